"""Send an image and a schema with OpenAI's client and print the JSON value of the answer.

mmengine serve
python examples/chat_image_schema.py [shapes.png [http://localhost:8000/v1]]

Without a file the script draws an image.
"""

import base64
import io
import json
import random
import sys
from pathlib import Path

import openai

from mmengine_shapes.scenes import COLOURS, random_scene

SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "triangle", "star", "cross"]},
        "colour": {"enum": list(COLOURS)},
    },
    "required": ["shape", "colour"],
    "additionalProperties": False,
}


def picture() -> bytes:
    if len(sys.argv) > 1:
        return Path(sys.argv[1]).read_bytes()
    file = io.BytesIO()
    random_scene(random.Random(1)).draw().save(file, "PNG")
    return file.getvalue()


def main() -> None:
    address = sys.argv[2] if len(sys.argv) > 2 else "http://localhost:8000/v1"
    client = openai.OpenAI(base_url=address, api_key="none")
    data = base64.b64encode(picture()).decode()
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
                    {"type": "text", "text": "Describe one shape of the image as JSON."},
                ],
            }
        ],
        temperature=0,
        max_completion_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}},
    )
    print(json.loads(answer.choices[0].message.content or ""))


if __name__ == "__main__":
    main()
