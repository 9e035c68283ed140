"""Forty requests for tool calls, each with the expected call."""

from typing import Any


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TEXT = {"type": "string", "maxLength": 40}
UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
CODE = {"type": "string", "enum": ["EUR", "USD", "GBP", "JPY"]}
TOOLS = [
    tool("get_weather", "Return the weather in a city.", city=TEXT, unit=UNIT),
    tool("set_timer", "Start a timer.", minutes={"type": "integer", "minimum": 1, "maximum": 600}),
    tool("convert", "Convert an amount of money.", amount={"type": "number"}, source=CODE, target=CODE),
    tool("send_message", "Send a text message to a person.", to=TEXT, text=TEXT),
]
_CITIES = ("Paris", "Tokyo", "Oslo", "Madrid", "Lima", "Cairo", "Berlin", "Rome", "Dublin", "Vienna")
_MINUTES = (1, 3, 5, 8, 10, 15, 20, 25, 45, 90)
_AMOUNTS = (
    *((10, "EUR", "USD"), (250, "USD", "JPY"), (99.5, "GBP", "EUR"), (7, "JPY", "USD"), (40, "EUR", "GBP")),
    *((1200, "USD", "EUR"), (15, "GBP", "JPY"), (3.5, "EUR", "JPY"), (80, "JPY", "GBP"), (60, "USD", "GBP")),
)
_MESSAGES = (
    *(("Anna", "I am late"), ("Tom", "See you at noon"), ("Maria", "Happy birthday"), ("Erik", "Call me")),
    *(
        ("Mei", "The train is here"),
        ("Paul", "Good night"),
        ("Ines", "Lunch is ready"),
        ("Omar", "Thank you"),
    ),
    *(("Lena", "I am at home"), ("Joe", "The meeting is over")),
)
CALLS = [
    *(
        (f"What is the weather in {city} in {unit}?", "get_weather", {"city": city, "unit": unit})
        for city, unit in zip(_CITIES, ("celsius", "fahrenheit") * 5, strict=True)
    ),
    *((f"Set a timer for {count} minutes.", "set_timer", {"minutes": count}) for count in _MINUTES),
    *(
        (
            f"Convert {amount} {source} to {target}.",
            "convert",
            {"amount": amount, "source": source, "target": target},
        )
        for amount, source, target in _AMOUNTS
    ),
    *(
        (f"Send {name} the message '{text}'.", "send_message", {"to": name, "text": text})
        for name, text in _MESSAGES
    ),
]
