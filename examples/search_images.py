"""Search a folder of pictures by a text or by a picture, with vectors in SQLite.

Requires: pip install apsw sqlite-vec

    python examples/search_images.py index PICTURES --db pictures.db
    python examples/search_images.py find "a red square" --db pictures.db
    python examples/search_images.py find --db pictures.db --picture photo.png
    python examples/search_images.py measure

`measure` draws 200 scenes, searches each by its caption and by a second drawing, and prints recall@5. Name an
embedding model with --model; the default is the included chat model.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import apsw
import sqlite_vec

from mmengine import Engine
from mmengine_shapes.scenes import Scene, random_scene

NEAREST = 5


def open_store(path: str, width: int = 0) -> apsw.Connection:
    """Open the database. `width`: if not 0, create an empty table for vectors with this many values."""
    store = apsw.Connection(path)
    store.enable_load_extension(True)
    store.load_extension(sqlite_vec.loadable_path())
    if width:
        store.execute("drop table if exists pictures")
        store.execute(f"create virtual table pictures using vec0(vector float[{width}], +path text)")
    return store


def index_pictures(engine: Engine, paths: Sequence[Path], db: str) -> apsw.Connection:
    vectors = engine.embed([{"image": str(path)} for path in paths])
    store = open_store(db, vectors.shape[1])
    rows = [(json.dumps(vector.tolist()), str(path)) for vector, path in zip(vectors, paths, strict=True)]
    with store:
        store.executemany("insert into pictures (vector, path) values (?, ?)", rows)
    return store


def find(engine: Engine, store: apsw.Connection, query: str | dict[str, str]) -> list[tuple[str, float]]:
    """Return the nearest pictures and their distances, nearest first."""
    (vector,) = engine.embed([query])
    ask = "select path, distance from pictures where vector match ? and k = ? order by distance"
    return list(store.execute(ask, (json.dumps(vector.tolist()), NEAREST)))


def caption(scene: Scene) -> str:
    things = (
        f"a {thing.size} {thing.colour} {thing.shape} at the {thing.position}" for thing in scene.things
    )
    return f"A {scene.background} picture with {', '.join(things)}."


def measure(engine: Engine, count: int) -> dict[str, float]:
    """Return recall@5: how often a query's own scene is among the five nearest of `count` pictures."""
    scenes = [random_scene(random.Random(number)) for number in range(count)]
    hits = {"caption": 0, "second drawing": 0}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.png" for number in range(count)]
        for scene, path in zip(scenes, paths, strict=True):
            scene.draw().save(path)
        store = index_pictures(engine, paths, ":memory:")
        again = Path(folder) / "again.png"
        for scene, path in zip(scenes, paths, strict=True):
            replace(scene, smooth=not scene.smooth, noise=0.05, noise_seed=scene.noise_seed + 1).draw().save(
                again
            )
            for kind, query in (("caption", caption(scene)), ("second drawing", {"image": str(again)})):
                hits[kind] += str(path) in [found for found, _ in find(engine, store, query)]
    return {kind: number / count for kind, number in hits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=("index", "find", "measure"))
    parser.add_argument("what", nargs="?", help="folder of pictures, or text to find")
    parser.add_argument("--picture", help="picture to find")
    parser.add_argument("--db", default="pictures.db")
    parser.add_argument("--model")
    parser.add_argument("--scenes", type=int, default=200)
    given = parser.parse_args()
    with Engine(given.model, task="embed") as engine:
        if given.task == "index":
            paths = sorted(path for path in Path(given.what).iterdir() if path.suffix in (".png", ".jpg"))
            index_pictures(engine, paths, given.db)
            print(f"{len(paths)} pictures are in {given.db}")
        elif given.task == "find":
            query = {"image": given.picture} if given.picture else given.what
            for path, distance in find(engine, open_store(given.db), query):
                print(f"{distance:.3f}  {path}")
        else:
            for kind, recall in measure(engine, given.scenes).items():
                print(f"recall@{NEAREST} of {given.scenes} pictures by {kind}: {recall:.3f}")


if __name__ == "__main__":
    main()
