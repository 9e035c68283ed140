"""Writes PDF documents for tests: valid documents with Pillow, and hostile documents as bytes."""

import random
import zlib

from mmengine_shapes.scenes import random_scene


def scene(seed, side=128):
    return random_scene(random.Random(seed), side=side)


def write_scenes(path, seeds, resolution=96):
    """Write a PDF document with a scene on each page."""
    first, *rest = [scene(seed).draw() for seed in seeds]
    first.save(path, "PDF", save_all=True, append_images=rest, resolution=resolution)


def write_pdf(path, *objects, trailer=b""):
    """Write a PDF document from the bodies of its objects. The first object is the catalog."""
    data = b"%PDF-1.7\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    count = len(objects) + 1
    end = b"trailer << /Size %d /Root 1 0 R %s >>\nstartxref\n%d\n%%%%EOF\n" % (count, trailer, len(data))
    path.write_bytes(data + b"xref\n0 %d\n0000000000 65535 f \n" % count + table + end)


CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"
ONE_PAGE = b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"


def page(box=b"0 0 72 72", more=b""):
    return b"<< /Type /Page /Parent 2 0 R /MediaBox [%s] %s >>" % (box, more)


def stream(data, more=b""):
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(data), more, data)


def write_encrypted(path):
    """Write an encrypted document that no password opens."""
    encrypt = b"<< /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >>" % (b"ab" * 32, b"cd" * 32)
    identity = b"/Encrypt 4 0 R /ID [<00> <00>]"
    write_pdf(path, CATALOG, ONE_PAGE, page(), encrypt, trailer=identity)


def write_many_pages(path, count):
    """Write a small document whose page tree repeats a page `count` times."""
    kids = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b"3 0 R " * count, count)
    write_pdf(path, CATALOG, kids, page())


def write_bomb(path, num_bytes):
    """Write a document with a page content of `num_bytes` bytes, compressed twice."""
    once = zlib.compress(b"0 0 m " * (num_bytes // 6), 9)
    twice = stream(zlib.compress(once, 9), b"/Filter [/FlateDecode /FlateDecode]")
    write_pdf(path, CATALOG, ONE_PAGE, page(more=b"/Contents 4 0 R"), twice)


def write_endless(path):
    """Write a document whose page draws a form that draws itself twice."""
    form = b"/Type /XObject /Subtype /Form /BBox [0 0 9 9] /Resources << /XObject << /A 4 0 R >> >>"
    more = b"/Contents 5 0 R /Resources << /XObject << /A 4 0 R >> >>"
    write_pdf(path, CATALOG, ONE_PAGE, page(more=more), stream(b"/A Do /A Do", form), stream(b"/A Do"))
