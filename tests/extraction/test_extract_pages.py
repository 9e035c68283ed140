"""Tests that PDF pages are rendered, and that hostile documents are refused with a clear error."""

import io
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from mmengine.config import EngineConfig
from mmengine.errors import InvalidMedia
from mmengine.processing.media.pages import MAX_PAGE_PIXELS
from mmengine.serve.extraction import plan
from mmengine.serve.extraction.documents import Document, find_documents
from mmengine.serve.extraction.pages import COPY_SIDE, PagePainter
from mmengine.serve.extraction.plan import Job, WorkFolder
from tests.extraction import pdf_documents as pdf

pytest.importorskip("pypdfium2")
MEMORY_BYTES = 2**27


@pytest.fixture(scope="module")
def painter():
    with closing(PagePainter(EngineConfig(media_process_bytes=MEMORY_BYTES), dpi=96, max_pages=100)) as made:
        yield made


def drawn(painter, path, tmp_path):
    return painter.draw(Document(str(path)), tmp_path / "pages")


def test_pages_look_like_the_pictures_in_them(painter, tmp_path):
    pdf.write_scenes(tmp_path / "a.pdf", [1, 2, 3])
    pages = drawn(painter, tmp_path / "a.pdf", tmp_path)
    assert [page.name for page in pages] == ["0001.png", "0002.png", "0003.png"]
    for seed, page in zip((1, 2, 3), pages, strict=True):
        expected = np.asarray(pdf.scene(seed).draw(), np.int16)
        found = np.asarray(Image.open(page).convert("RGB").resize(expected.shape[1::-1]), np.int16)
        assert np.abs(found - expected).mean() < 6  # Pillow stores the pictures as JPEG.


def test_a_drawn_page_is_not_drawn_again(painter, tmp_path):
    pdf.write_scenes(tmp_path / "a.pdf", [1, 2])
    first, second = drawn(painter, tmp_path / "a.pdf", tmp_path)
    first.write_bytes(b"kept")
    second.unlink()
    assert drawn(painter, tmp_path / "a.pdf", tmp_path) == [first, second]
    assert first.read_bytes() == b"kept" and Image.open(second).size == (128, 128)


def test_the_value_of_a_filled_form_is_drawn(painter, tmp_path):
    look = pdf.stream(b"1 0 0 rg 0 0 72 72 re f", b"/Type /XObject /Subtype /Form /BBox [0 0 72 72]")
    field = (
        b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (a) /V (b) /Rect [0 0 72 72] /F 4 /AP << /N 5 0 R >> >>"
    )
    catalog = b"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [4 0 R] >> >>"
    pdf.write_pdf(tmp_path / "a.pdf", catalog, pdf.ONE_PAGE, pdf.page(more=b"/Annots [4 0 R]"), field, look)
    (page,) = drawn(painter, tmp_path / "a.pdf", tmp_path)
    red, green, blue = Image.open(page).getpixel((48, 48))
    assert red > 200 and green < 100 and blue < 100  # PDFium's highlight of the field is transparent.


def test_a_plan_that_was_interrupted_is_the_same_afterwards(tmp_path):
    pdf.write_scenes(tmp_path / "a.pdf", [1, 2])
    pdf.write_encrypted(tmp_path / "b.pdf")
    documents = find_documents([tmp_path], 2**20)
    job = Job(b"{}", "?", "page", 9, None, None, 96, 9, 2**20, "", {})
    work = WorkFolder(tmp_path / "work", "page")
    work.begin(job, documents)
    done = []
    work.plan(job, documents, PagePainter(EngineConfig(), 96, 9), lambda: done.append(1))
    before = work.requests.read_bytes()
    assert len(done) == 2 and len(before.splitlines()) == 2
    first, second = sorted(work.path.glob("pages/*/*.png"))
    stamp = first.stat().st_mtime_ns
    work.requests.unlink()
    second.unlink()
    work.begin(job, documents)
    assert not work.is_planned
    work.plan(job, documents, PagePainter(EngineConfig(), 96, 9), lambda: None)
    assert work.requests.read_bytes() == before and second.exists() and first.stat().st_mtime_ns == stamp


def test_a_work_folder_whose_beginning_was_killed_is_begun_again(tmp_path, monkeypatch):
    def killed(path, data):
        path.with_name(f"{path.name}.part").write_bytes(data[:9])
        raise SystemExit

    pdf.write_scenes(tmp_path / "a.pdf", [1])
    documents = find_documents([tmp_path], 2**20)
    job = Job(b"{}", "?", "page", 9, None, None, 96, 9, 2**20, "", {})
    work = WorkFolder(tmp_path / "work", "page")
    with monkeypatch.context() as before, pytest.raises(SystemExit):
        before.setattr(plan, "write_whole", killed)
        work.begin(job, documents)
    for _ in range(2):
        work.begin(job, documents)
    work.plan(job, documents, PagePainter(EngineConfig(), 96, 9), lambda: None)
    assert work.is_planned and len(list(work.path.glob("pages/*/*.png"))) == 1


def test_a_huge_page_is_drawn_smaller(painter, tmp_path):
    pdf.write_pdf(tmp_path / "a.pdf", pdf.CATALOG, pdf.ONE_PAGE, pdf.page(b"0 0 200000 100000"))
    (page,) = drawn(painter, tmp_path / "a.pdf", tmp_path)
    width, height = Image.open(page).size
    assert MAX_PAGE_PIXELS * 0.99 < width * height < MAX_PAGE_PIXELS * 1.01


def write_garbage(path):
    path.write_bytes(b"%PDF-1.7\n" + bytes(range(256)) * 40)


HOSTILE = {
    "encrypted": (pdf.write_encrypted, "is encrypted and needs a password"),
    "10,000 pages": (lambda path: pdf.write_many_pages(path, 10_000), "has 10,000 pages; the limit is 100"),
    "garbage": (write_garbage, "is not a readable PDF document"),
    "empty": (lambda path: path.write_bytes(b""), "is not a readable PDF document"),
    "no pages": (lambda path: pdf.write_many_pages(path, 0), "is not a readable PDF document"),
    "a form that draws itself": (pdf.write_endless, "needs more than 128 MiB|its process died|damaged"),
    "a bomb": (lambda path: pdf.write_bomb(path, 2**28), "needs more than 128 MiB|its process died|damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_document_is_refused_and_the_next_one_drawn(painter, tmp_path, name):
    write, message = HOSTILE[name]
    write(tmp_path / "a.pdf")
    with pytest.raises(InvalidMedia, match=message):
        drawn(painter, tmp_path / "a.pdf", tmp_path)
    pdf.write_scenes(tmp_path / "b.pdf", [1])
    assert len(painter.draw(Document(str(tmp_path / "b.pdf")), tmp_path / "good")) == 1


def test_a_copy_is_small_and_none_for_a_damaged_picture(painter, tmp_path):
    Image.new("RGB", (3000, 300), "red").save(tmp_path / "wide.png")
    copy = painter.copy(tmp_path / "wide.png")
    assert Image.open(io.BytesIO(copy)).size == (COPY_SIDE, round(COPY_SIDE / 10))
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    assert painter.copy(tmp_path / "bad.png") is None
