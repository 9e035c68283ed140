"""Tests `mmengine extract` without a model: columns, tables, the review page and the search for documents."""

import csv
import io
import json
import os
import sys
import tomllib
from html.parser import HTMLParser

import msgspec
import pytest
from PIL import ExifTags, Image

from mmengine.errors import ConfigError, InvalidRequest
from mmengine.models.box_unit import BoxUnit
from mmengine.processing.media.boxes import frame_of, restore
from mmengine.serve.extraction import review
from mmengine.serve.extraction.boxes import write_boxes
from mmengine.serve.extraction.columns import MAX_COLUMNS, Columns, leaves
from mmengine.serve.extraction.documents import find_documents
from mmengine.serve.extraction.plan import WorkFolder
from mmengine.serve.extraction.results import Results
from mmengine.serve.extraction.review import MAX_ROWS, write_review
from mmengine.serve.extraction.table import check_format, json_line, write_table
from tests.project.doc_blocks import ROOT
from tests.replay.browser import Browser, chromium

SCHEMA = {
    "type": "object",
    "properties": {
        "total": {"type": "number"},
        "count": {"type": "integer"},
        "paid": {"type": "boolean"},
        "customer": {"type": "object", "properties": {"name": {"type": "string"}}},
        "items": {"type": "array", "items": {"type": "string"}},
    },
    "additionalProperties": True,
}
TEXT = json.dumps(SCHEMA).encode()
needs_chromium = pytest.mark.skipif(chromium() is None, reason="needs chromium")
TAGS = {"html", "head", "meta", "title", "style", "body", "header", "h1", "p", "label", "input", "main"}
TAGS |= {"svg", "rect", "article", "h2", "bdi", "span", "div", "img", "table", "tr", "th", "td", "meter"}
HOSTILE = "</td><script>alert(1)</script>&\"'\u202e"


def results_of(tmp_path, values, names=None, min_confidence=0.9, p=0.95, schema=TEXT, **fields):
    """Return the results of a work folder with the answers `values`. A str is an answer's text, any other
    value is written as JSON.
    """
    lines, answers = [], []
    for number, value in enumerate(values, 1):
        name = names[number - 1] if names else f"{number}.png"
        lines.append({"document": name, "pictures": [f"{number}.png"], "error": ""})
        text = value if isinstance(value, str) else json.dumps(value)
        leaves = value if isinstance(value, dict) else {}
        confidence = {f"/{key}": {"p": p, "min": p, "entropy": 0.1, "others": []} for key in leaves}
        answer = {"custom_id": str(number), "text": text, "finish_reason": "stop"}
        answers.append({**answer, "field_confidence": confidence, **fields})
    (tmp_path / "documents.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in reversed(answers)))
    return Results(WorkFolder(tmp_path, "document"), schema, min_confidence)


def csv_rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_schema_decides_the_columns():
    assert Columns(SCHEMA).names == ["/total", "/count", "/paid", "/customer/name", "/items"]
    assert Columns({"type": "string"}).names == [""]
    branches = {
        "anyOf": [{"$ref": "#/$defs/a"}, {"properties": {"b/c": {}}}],
        "$defs": {"a": {"properties": {"a~": {}}}},
    }
    assert Columns(branches).names == ["/a~0", "/b~1c"]


def test_an_object_that_contains_itself_is_one_column():
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"properties": {"l": {"$ref": "#/$defs/t"}, "n": {}}}}}
    assert Columns(tree).names == ["/l", "/n"]
    loop = {"allOf": [{"$ref": "#"}] * 50}
    assert Columns(loop).names == [""]
    wide = {"properties": {str(number): {} for number in range(3 * MAX_COLUMNS)}}
    assert len(Columns(wide).names) == MAX_COLUMNS


def test_definitions_that_refer_to_one_another_are_visited_once():
    names = [f"d{number}" for number in range(30)]
    refs = [{"$ref": f"#/$defs/{name}"} for name in names]
    ends = {name: {"anyOf": refs, "properties": {name: {"type": "integer"}}} for name in names}
    assert Columns({"anyOf": refs, "$defs": ends}).names == [f"/{name}" for name in reversed(names)]


def test_values_without_a_column_are_in_other():
    columns = Columns(SCHEMA)
    value = {"total": 1, "customer": {"name": "A", "id": 7}, "items": ["a"], "more": {"x": []}}
    assert columns.flatten(value) == {
        "/total": 1,
        "/customer/name": "A",
        "/items": ["a"],
        "other": {"/customer/id": 7, "/more": {"x": []}},
    }
    assert columns.flatten({"customer": None}) == {}
    assert columns.flatten({"customer": "A"}) == {"other": {"/customer": "A"}}
    assert Columns(True).flatten("text") == {"": "text"}


def test_leaves_are_scalars_and_empty_containers_in_order():
    value = {"a/b": [1, [], {"c": None}], "d": {}, "e": "x"}
    expected = [("/a~1b/0", 1), ("/a~1b/1", []), ("/a~1b/2/c", None), ("/d", {}), ("/e", "x")]
    assert list(leaves(value)) == expected and list(leaves(7)) == [("", 7)]
    for _ in range(2 * sys.getrecursionlimit()):
        value = [value]
    assert [each for _, each in leaves(value)] == [each for _, each in expected]


def test_a_value_in_a_column_has_the_columns_pointer():
    columns = Columns(SCHEMA)
    pointers = ("/total", "/items/3/a", "/customer/name", "/customer/id", "/more/x")
    assert [columns.column_of(each) for each in pointers] == ["/total", "/items", "/customer/name", "", ""]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "＝1", "－1"])
def test_csv_has_no_formulas(tmp_path, text):
    results = results_of(tmp_path, [{"customer": {"name": text}, "total": -1.5}], [f"{text}.png"])
    write_table(results, TEXT, tmp_path / "a.csv")
    (row,) = csv_rows(tmp_path / "a.csv")
    assert row["/customer/name"] == f"'{text}" and row["document"] == f"'{text}.png"
    assert row["/total"] == "-1.5"  # A number cannot be a formula, so no apostrophe is added.
    assert "'" not in "".join(json_line(result) for result in results)


def test_csv_has_a_column_for_each_probability(tmp_path):
    results = results_of(tmp_path, [{"total": 2, "paid": True}], p=0.8)
    write_table(results, TEXT, tmp_path / "a.csv")
    (row,) = csv_rows(tmp_path / "a.csv")
    assert (row["status"], row["check"], row["confidence"], row["page"]) == (
        "check",
        "/total /paid",
        "0.8",
        "",
    )
    assert (row["/total"], row["p:/total"], row["/paid"], row["p:/count"]) == ("2", "0.8", "true", "")


def test_parquet_columns_have_the_types_of_their_values(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    values = [
        {"total": 1, "count": 3, "paid": True, "items": ["a"], "customer": {"name": "=A"}},
        {"total": 1.5, "count": 4, "paid": False, "items": [], "customer": {"name": "\ud800"}},
    ]
    write_table(results_of(tmp_path, values), TEXT, tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    kinds = {
        name: str(table.schema.field(name).type) for name in ("/total", "/count", "/paid", "/items", "page")
    }
    assert kinds == {
        "/total": "double",
        "/count": "int64",
        "/paid": "bool",
        "/items": "string",
        "page": "int64",
    }
    assert table["/customer/name"].to_pylist() == ["=A", "?"] and table["/total"].to_pylist() == [1.0, 1.5]
    mixed = [{"count": 10**40}, {"count": 2}]
    write_table(results_of(tmp_path, mixed), TEXT, tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet")["/count"].to_pylist() == [str(10**40), "2"]


def test_json_lines_have_the_value_as_the_model_wrote_it(tmp_path):
    text = f'{{"total": 1e999,\n "count": {10**40}, "items": ["\\ud800"]}}'
    results = results_of(tmp_path, [text])
    write_table(results, TEXT, tmp_path / "a.jsonl")
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    assert json.loads(line)["value"] == json.loads(text) and line.endswith(text.replace("\n", " ") + "}")
    write_table(results, TEXT, tmp_path / "a.csv")
    assert csv_rows(tmp_path / "a.csv")[0]["/count"] == str(10**40)


def test_json_lines_keep_the_line_separators_in_texts(tmp_path):
    value = {"customer": {"name": "a\u2028b\u2029c\x85d"}}
    text = json.dumps(value, ensure_ascii=False, indent=1).replace("\n", "\r\n")
    write_table(results_of(tmp_path, [text]), TEXT, tmp_path / "a.jsonl")
    (line,) = (tmp_path / "a.jsonl").read_bytes().splitlines()
    assert json.loads(line)["value"] == value


def test_answers_that_are_cut_or_wrong_are_invalid(tmp_path):
    cut = list(results_of(tmp_path, ['{"total": 1'], finish_reason="length"))
    assert cut[0].status == "invalid" and "--max-tokens" in cut[0].error and cut[0].value is None
    wrong = list(results_of(tmp_path, [{"total": "a"}]))
    assert wrong[0].status == "invalid" and "/total" in wrong[0].error and wrong[0].value == {"total": "a"}
    failed = list(results_of(tmp_path, [{}], error="the image is damaged"))
    assert (failed[0].status, failed[0].error) == ("error", "the image is damaged")


def test_a_table_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "a.csv").write_text("before")

    class Broken:
        def __iter__(self):
            raise OSError("no space")

    with pytest.raises(OSError):
        write_table(Broken(), TEXT, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "before" and os.listdir(tmp_path) == ["a.csv"]


def test_a_wheel_contains_the_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["mmengine.serve.extraction"]
    folder = ROOT / "mmengine" / "serve" / "extraction"
    packed = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert packed == {"review.html", "review.css"}


def test_a_missing_library_and_an_unknown_format_are_named(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="must end in one of .jsonl, .csv, .parquet"):
        check_format(tmp_path / "a.xlsx")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install '\.\[parquet\]'"):
        check_format(tmp_path / "a.parquet")


class FakePainter:
    num_workers = 1

    def copy(self, picture):
        return b"jpeg" if picture.name == "1.png" else None


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.texts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_escapes_names_and_answers(tmp_path):
    values = [{"customer": HOSTILE, HOSTILE: HOSTILE}, {"total": 1}]
    results = results_of(tmp_path, values, [HOSTILE, "b.png"], p=0.5)
    assert write_review(results, tmp_path, FakePainter(), 0.9, tmp_path / "a.html") == 2
    page = (tmp_path / "a.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.tags and tags.texts.count(HOSTILE) >= 2
    assert set(tags.tags) <= TAGS
    assert "default-src 'none'; img-src data:" in page and "picture 1 is left out" in page


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_lie_on_the_same_part_of_the_picture(tmp_path, orientation):
    """For every EXIF orientation, the page shows the picture upright, with the box on the red area."""
    upright = Image.new("RGB", (100, 50), "white")
    upright.paste("red", (10, 20, 40, 30))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    turn = {6: "ROTATE_90", 8: "ROTATE_270", 3: "ROTATE_180", 2: "FLIP_LEFT_RIGHT", 4: "FLIP_TOP_BOTTOM"}
    turn |= {5: "TRANSPOSE", 7: "TRANSVERSE"}
    method = getattr(Image.Transpose, turn[orientation]) if orientation in turn else None
    stored = upright if method is None else upright.transpose(method)
    stored.save(tmp_path / "1.png", exif=exif)
    schema = json.dumps({"properties": {"bbox_2d": {"type": "array"}}}).encode()
    results = results_of(tmp_path, [{"bbox_2d": [100, 400, 400, 600]}], schema=schema)

    class Boxes:
        def boxes(self, value, schema, image):
            frame = frame_of(Image.open(image))
            return {"/bbox_2d": restore(value["bbox_2d"], BoxUnit("thousandths"), frame)}

    write_boxes(Boxes(), results, schema, tmp_path, tmp_path / "boxes.jsonl")
    (result,) = Results(WorkFolder(tmp_path, "document"), schema, 0.9)
    box = result.boxes["/bbox_2d"]
    assert box.shown == pytest.approx((0.1, 0.4, 0.4, 0.6)) and not box.problem
    left, top, right, bottom = map(round, box.pixels)
    assert set(stored.crop((left, top, right, bottom)).get_flattened_data()) == {(255, 0, 0)}
    assert json.loads(json_line(result))["boxes"]["/bbox_2d"]["pixels"] == pytest.approx(box.pixels)
    write_review([result], tmp_path, FakePainter(), 0.9, tmp_path / "a.html")
    assert (
        '<rect x="0.10000" y="0.40000" width="0.30000" height="0.20000">' in (tmp_path / "a.html").read_text()
    )


def test_the_pictures_together_keep_their_limit_within_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(review, "MAX_PICTURE_BYTES", 3500)

    class Painter(FakePainter):
        def copy(self, picture):
            return b"x" * 1000

    results = results_of(tmp_path, [{"total": each} for each in range(10)])
    write_review(results, tmp_path, Painter(), 0.9, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.count("data:image/jpeg") == 3 and page.count("picture 1 is left out") == 7


@needs_chromium
def test_the_page_fits_a_telephone_and_runs_nothing(tmp_path):
    class Painter(FakePainter):
        def copy(self, picture):
            file = io.BytesIO()
            Image.new("RGB", (1024, 700), "red").save(file, "JPEG")
            return file.getvalue()

    long = "a" * 300
    values = [{"customer": HOSTILE, long: long}, {"total": 1}]
    results = results_of(tmp_path, values, [f"{long}.png", HOSTILE], p=0.5)
    write_review(results, tmp_path, Painter(), 0.9, tmp_path / "a.html")
    browser = Browser(width=390, height=844)
    try:
        browser.call("Page.navigate", url=(tmp_path / "a.html").as_uri())
        browser.wait("document.readyState === 'complete' && document.images.length === 2")
        browser.wait("document.images[0].naturalWidth === 1024")
        page = "document.documentElement"
        assert browser.run(f"{page}.scrollWidth") == browser.run(f"{page}.clientWidth") <= 390
        assert browser.run("document.scripts.length") == 0 and not browser.errors
        shown = "[...document.querySelectorAll('article')].filter(each => each.offsetHeight).length"
        assert browser.run(shown) == 2
        browser.run("document.getElementById('doubtful').click()")
        assert browser.run(shown) == 2  # Both rows have doubtful fields.
        browser.run("document.querySelector('article').className = 'ok'")
        assert browser.run(shown) == 1
    finally:
        browser.close()


def test_the_page_has_the_least_certain_rows_first(tmp_path):
    count = MAX_ROWS + 2
    results = list(results_of(tmp_path, [{"total": 1}] * count))
    for number, result in enumerate(results):
        field = result.confidence["/total"]
        confidence = {"/total": msgspec.structs.replace(field, p=1 - number / count)}
        results[number] = msgspec.structs.replace(result, confidence=confidence)
    results[0] = msgspec.structs.replace(results[0], status="error", error="damaged")
    assert write_review(results, tmp_path, FakePainter(), 0.9, tmp_path / "a.html") == MAX_ROWS
    page = (tmp_path / "a.html").read_text()
    shown = [part.partition("</bdi>")[0] for part in page.split("<h2><bdi>")[1:]]
    assert shown[:3] == ["1.png", f"{count}.png", f"{count - 1}.png"]
    assert f"the page shows only {MAX_ROWS} rows" in page


def test_documents_are_found_in_order_without_work_folders(tmp_path):
    (tmp_path / "b" / "out.work" / "pages").mkdir(parents=True)
    (tmp_path / "b" / "out.work" / "extract.json").write_text("{}")
    for name in ("b/out.work/pages/1.png", "b/2.PDF", "b/notes.txt", "a.jpg", "c.png"):
        (tmp_path / name).write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe.png")
    found = find_documents([tmp_path, tmp_path / "a.jpg", tmp_path / "b" / "notes.txt"], 5)
    shown = {os.path.relpath(each.name, tmp_path): each.error for each in found}
    assert list(shown) == ["a.jpg", "c.png", "pipe.png", "b/2.PDF", "b/notes.txt"]
    assert (
        shown["pipe.png"] == "the document is not a regular file"
        and "does not end in" in shown["b/notes.txt"]
    )
    (large,) = find_documents([tmp_path / "a.jpg"], 4)
    assert large.error == "the file has 5 bytes; the limit is 4 (--max-bytes)"
    with pytest.raises(InvalidRequest, match="no such file or folder"):
        find_documents([tmp_path / "d"], 5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match="there is no document"):
        find_documents([tmp_path / "empty"], 5)


def test_a_name_that_is_not_unicode_is_an_error(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.png", "wb") as file:
        Image.new("RGB", (8, 8)).save(file, "PNG")
    (found,) = find_documents([tmp_path], 10_000)
    assert "not valid UTF-8" in found.error and found.name.endswith("\ufffd.png")
