"""Eight realistic JSON schemas, and for each schema five texts that state the required values."""


def of(required, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


TEXT = {"type": "string", "maxLength": 40}  # A small model may not find the end of a longer text.
COUNT, TRUTH = {"type": "integer", "minimum": 0}, {"type": "boolean"}
DATE = {"type": "string", "format": "date"}
PERSON = of(None, name=TEXT, age={"type": "integer", "minimum": 0, "maximum": 130}, city=TEXT)
CONTACT = of(None, name=TEXT, email={"type": "string", "format": "email"})
ORDER = of(
    None, item=TEXT, quantity={"type": "integer", "minimum": 1}, unit_price={"type": "number", "minimum": 0}
)
EVENT = of(None, title=TEXT, date=DATE, place=TEXT)
REVIEW = of(
    None,
    product=TEXT,
    sentiment={"enum": ["positive", "negative", "neutral"]},
    stars={"type": "integer", "minimum": 1, "maximum": 5},
)
TICKET = of(
    None,
    number=COUNT,
    priority={"type": "string", "enum": ["low", "medium", "high"]},
    open=TRUTH,
)
SHOPPING = of(None, shop=TEXT, items={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 6})
BOOK = of(
    ["title", "author", "year"],
    title=TEXT,
    author=of(None, first=TEXT, last=TEXT),
    year={"type": "integer", "minimum": 1000, "maximum": 2100},
    pages={"type": ["integer", "null"], "minimum": 1},
)


def named(names, *rows):
    return [(text, dict(zip(names.split(), values, strict=True))) for text, *values in rows]


FORMS = [
    (
        PERSON,
        named(
            "name age city",
            ("Anna is 31 years old and lives in Lyon.", "Anna", 31, "Lyon"),
            ("My name is Tom. I am 8 and I live in Boston.", "Tom", 8, "Boston"),
            ("Maria, 45, lives in Madrid.", "Maria", 45, "Madrid"),
            ("In Oslo lives Erik, who is 72 years old.", "Erik", 72, "Oslo"),
            ("Name: Mei. Age: 27. City: Taipei.", "Mei", 27, "Taipei"),
        ),
    ),
    (
        CONTACT,
        named(
            "name email",
            ("Write to Paul at paul@example.org.", "Paul", "paul@example.org"),
            ("Contact: Ines, ines@example.com", "Ines", "ines@example.com"),
            ("The address of Omar is omar.k@example.net.", "Omar", "omar.k@example.net"),
            ("Questions? Ask Lena: lena@example.org", "Lena", "lena@example.org"),
            ("Name: Joe. Email: joe99@example.com.", "Joe", "joe99@example.com"),
        ),
    ),
    (
        ORDER,
        named(
            "item quantity unit_price",
            ("I want 3 lamps at 24 dollars each.", "lamps", 3, 24),
            ("Item: chair. Quantity: 4. Unit price: 49.5.", "chair", 4, 49.5),
            ("Please send 12 pencils, 0.75 each.", "pencils", 12, 0.75),
            ("One table for 180.", "table", 1, 180),
            ("Order of 20 cups; a cup costs 6.", "cups", 20, 6),
        ),
    ),
    (
        EVENT,
        named(
            "title date place",
            ("Title: Team lunch. Date: 2024-05-17. Place: Rome.", "Team lunch", "2024-05-17", "Rome"),
            ("The Jazz Night is on 2025-02-01 in Prague.", "Jazz Night", "2025-02-01", "Prague"),
            ("On 2023-11-30 there is a Book Fair in Leipzig.", "Book Fair", "2023-11-30", "Leipzig"),
            ("Chess Cup, 2022-08-09, Vienna", "Chess Cup", "2022-08-09", "Vienna"),
            ("Come to Paris on 2026-07-14 for the Summer Party.", "Summer Party", "2026-07-14", "Paris"),
        ),
    ),
    (
        REVIEW,
        named(
            "product sentiment stars",
            ("The kettle is wonderful, 5 stars!", "kettle", "positive", 5),
            ("Product: mouse. Sentiment: negative. Stars: 1.", "mouse", "negative", 1),
            ("This umbrella broke on the first day. 1 star.", "umbrella", "negative", 1),
            ("The desk is fine, nothing more. Neutral, 3 stars.", "desk", "neutral", 3),
            ("I love my new headphones: 4 stars, positive.", "headphones", "positive", 4),
        ),
    ),
    (
        TICKET,
        named(
            "number priority open",
            ("Ticket 4711 has priority high and is open: true.", 4711, "high", True),
            ("Number: 12. Priority: low. Open: false.", 12, "low", False),
            ("Ticket 305, priority medium, open is true.", 305, "medium", True),
            ("Ticket 88 is closed (open: false), its priority was high.", 88, "high", False),
            ("Number 1024, open: true, priority: low.", 1024, "low", True),
        ),
    ),
    (
        SHOPPING,
        named(
            "shop items",
            ("At the bakery I buy bread and rolls.", "bakery", ["bread", "rolls"]),
            ("Shop: market. Items: apples, pears, milk.", "market", ["apples", "pears", "milk"]),
            ("From the pharmacy we need soap.", "pharmacy", ["soap"]),
            ("Butcher: ham, sausages", "Butcher", ["ham", "sausages"]),
            ("In the garden shop get seeds, soil and pots.", "garden shop", ["seeds", "soil", "pots"]),
        ),
    ),
    (
        BOOK,
        named(
            "title author year",
            ("Emma, by Jane Austen, 1815.", "Emma", {"first": "Jane", "last": "Austen"}, 1815),
            ("Title: Dubliners. Author: James Joyce. Year: 1914.", "Dubliners",
             {"first": "James", "last": "Joyce"}, 1914),
            ("George Orwell wrote Animal Farm in 1945.", "Animal Farm",
             {"first": "George", "last": "Orwell"}, 1945),
            ("Dracula was written by Bram Stoker in 1897.", "Dracula",
             {"first": "Bram", "last": "Stoker"}, 1897),
            ("Mary Shelley, Frankenstein (1818)", "Frankenstein", {"first": "Mary", "last": "Shelley"}, 1818),
        ),
    ),
]  # fmt: skip
ASKED = "Extract the values from the text as JSON with the keys {keys}.\n\nText: {text}"
CASES = [
    (ASKED.format(keys=", ".join(schema["properties"]), text=text), schema, stated)
    for schema, texts in FORMS
    for text, stated in texts
]
