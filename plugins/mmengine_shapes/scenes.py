"""Draws random scenes of coloured shapes with Pillow, and short clips of one shape.

A scene has a plain background and one to four shapes (things), at most one per cell of a 3x3 grid. The
reading order is therefore unambiguous. Lengths are fractions of the picture's side.

Training and held-out scenes never share a layout. A layout is the background, and the position, shape, colour
and size of every thing. A checksum assigns one layout in eight to the held-out split.
"""

import math
import random
import zlib
from dataclasses import dataclass, replace

from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS = {
    "red": (215, 35, 35),
    "green": (40, 160, 60),
    "blue": (40, 70, 215),
    "yellow": (240, 215, 40),
    "orange": (245, 140, 25),
    "purple": (135, 50, 170),
    "cyan": (50, 200, 215),
    "pink": (250, 145, 190),
}
SIZES = {"small": (0.085, 0.095), "medium": (0.115, 0.130), "large": (0.152, 0.165)}
POSITIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
BACKGROUNDS = {"white": (250, 250, 250), "grey": (128, 128, 128), "black": (12, 12, 12)}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Thing:
    """One shape. `x` and `y` (centre) and `radius` are fractions of the side. `angle` is in degrees."""

    shape: str
    colour: str
    size: str
    position: str
    x: float
    y: float
    radius: float
    angle: float
    rgb: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """All parameters of a square picture."""

    side: int
    background: str
    things: tuple[Thing, ...]
    smooth: bool
    noise: float
    noise_seed: int

    def layout(self) -> str:
        """Return the scene's layout as text. Scenes with equal layouts have equal answers."""
        words = [f"{t.position} {t.shape} {t.colour} {t.size}" for t in self.things]
        return f"{self.background}: " + ", ".join(words)

    def draw(self) -> Image.Image:
        """Draw the picture, RGB, `side` x `side` pixels."""
        scale = (2 if self.side > 128 else 3) if self.smooth else 1
        picture = Image.new("RGB", (self.side * scale,) * 2, BACKGROUNDS[self.background])
        pen = ImageDraw.Draw(picture)
        for thing in self.things:
            draw_thing(pen, thing, self.side * scale)
        if scale > 1:
            picture = picture.resize((self.side, self.side), Image.Resampling.BOX)
        return add_noise(picture, self.noise, self.noise_seed)


@dataclass(frozen=True)
class Clip:
    """A short clip in which one thing moves, or changes its colour once."""

    scenes: tuple[Scene, ...]
    fps: float
    action: str  # A key in DIRECTIONS, or "recolour".

    @property
    def first(self) -> Thing:
        return self.scenes[0].things[0]

    @property
    def last(self) -> Thing:
        return self.scenes[-1].things[0]

    def layout(self) -> str:
        """Return the clip's layout as text."""
        return f"{self.scenes[0].layout()} {self.action} {self.last.colour} {len(self.scenes)}"

    def frames(self) -> list[Image.Image]:
        """Return the pictures in order, RGB."""
        return [scene.draw() for scene in self.scenes]

    def timestamps(self) -> list[float]:
        """Return the middle time for each pair of frames, in seconds. The prompt has the same times."""
        return [(2 * pair + 0.5) / self.fps for pair in range(len(self.scenes) // 2)]


def draw_thing(pen: ImageDraw.ImageDraw, thing: Thing, side: int) -> None:
    """Fill the outline of one thing on a canvas of `side` pixels."""
    x, y, radius = thing.x * side, thing.y * side, thing.radius * side
    if thing.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=thing.rgb)
        return
    turn = math.radians(thing.angle)
    corners = [
        (
            x + radius * (px * math.cos(turn) - py * math.sin(turn)),
            y + radius * (px * math.sin(turn) + py * math.cos(turn)),
        )
        for px, py in OUTLINES[thing.shape]
    ]
    pen.polygon(corners, fill=thing.rgb)


def _star() -> list[tuple[float, float]]:
    rays = [(1.1 if k % 2 == 0 else 0.45, math.pi * (k / 5 - 0.5)) for k in range(10)]
    return [(length * math.cos(turn), length * math.sin(turn)) for length, turn in rays]


def _cross(arm: float = 1.0, half: float = 0.32) -> list[tuple[float, float]]:
    return [
        (-half, -arm),
        (half, -arm),
        (half, -half),
        (arm, -half),
        (arm, half),
        (half, half),
        (half, arm),
        (-half, arm),
        (-half, half),
        (-arm, half),
        (-arm, -half),
        (-half, -half),
    ]


OUTLINES = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(0.0, -1.0), (1.0, 0.8), (-1.0, 0.8)],
    "star": _star(),
    "cross": _cross(),
}


def add_noise(picture: Image.Image, strength: float, seed: int) -> Image.Image:
    """Blend the picture with uniform noise from `seed`. `strength`: weight of the noise, 0 to 1."""
    if strength == 0:
        return picture
    width, height = picture.size
    grain = Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
    return Image.blend(picture, grain, strength)


def in_split(layout: str, split: str) -> bool:
    """Return whether a layout belongs to `split`; one layout in eight is held out."""
    return (zlib.crc32(layout.encode()) % 8 == 0) == (split == "held_out")


def random_thing(rng: random.Random, position: str) -> Thing:
    """Return a random thing near the middle of the cell at `position`."""
    size = rng.choice(list(SIZES))
    colour = rng.choice(list(COLOURS))
    row, column = divmod(POSITIONS.index(position), 3)
    return Thing(
        shape=rng.choice(SHAPES),
        colour=colour,
        size=size,
        position=position,
        x=(2 * column + 1) / 6 + rng.uniform(-0.015, 0.015),
        y=(2 * row + 1) / 6 + rng.uniform(-0.015, 0.015),
        radius=rng.uniform(*SIZES[size]),
        angle=rng.uniform(-10, 10) if rng.random() < 0.5 else 0.0,
        rgb=_shade(rng, colour),
    )


def _shade(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (min(255, max(0, part + rng.randint(-14, 14))) for part in COLOURS[colour])
    return red, green, blue


def random_scene(
    rng: random.Random, side: int = 96, split: str = "held_out", most: int = 4, count: int | None = None
) -> Scene:
    """Return a scene with `count` things (default: 1 to `most`) whose layout lies in `split`."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    while True:
        number = count or rng.randint(1, most)
        cells = sorted(rng.sample(range(len(POSITIONS)), number))
        scene = Scene(
            side=side,
            background=rng.choice(list(BACKGROUNDS)),
            things=tuple(random_thing(rng, POSITIONS[cell]) for cell in cells),
            smooth=rng.random() < 0.4,
            noise=rng.uniform(0.02, 0.07) if rng.random() < 0.4 else 0.0,
            noise_seed=rng.getrandbits(32),
        )
        if in_split(scene.layout(), split):
            return scene


def random_clip(
    rng: random.Random, side: int = 96, split: str = "held_out", frames: int | None = None
) -> Clip:
    """Return a clip with `frames` pictures (default: 4, 6 or 8) whose layout lies in `split`."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, not {split!r}")
    while True:
        number = frames or rng.choice((4, 6, 8))
        start = random_scene(rng, side, "train", count=1)
        action = rng.choice((*DIRECTIONS, "recolour", "recolour"))
        things = _recolour(rng, start, number) if action == "recolour" else _move(start, number, action)
        scenes = tuple(
            Scene(side, start.background, (thing,), start.smooth, start.noise, start.noise_seed + k)
            for k, thing in enumerate(things)
        )
        clip = Clip(scenes, rng.choice((1.0, 2.0, 4.0)), action)
        if in_split(clip.layout(), split):
            return clip


def _move(start: Scene, number: int, direction: str) -> list[Thing]:
    """Return the thing of `start` in each frame, moved across the picture in even steps."""
    thing, (dx, dy) = start.things[0], DIRECTIONS[direction]
    moved = []
    for k in range(number):
        way = -0.29 + 0.58 * k / (number - 1)
        x, y = (0.5 + dx * way if dx else thing.x), (0.5 + dy * way if dy else thing.y)
        cell = 3 * min(2, int(3 * y)) + min(2, int(3 * x))
        moved.append(replace(thing, position=POSITIONS[cell], x=x, y=y))
    return moved


def _recolour(rng: random.Random, start: Scene, number: int) -> list[Thing]:
    """Return the thing of `start` in each frame, with a second colour from a random frame on."""
    thing = start.things[0]
    colour = rng.choice([name for name in COLOURS if name != thing.colour])
    second = replace(thing, colour=colour, rgb=COLOURS[colour])
    change = 2 * rng.randint(1, number // 2 - 1)
    return [thing] * change + [second] * (number - change)
