"""Call a tool in a loop with OpenAI's client: the model calls, the result goes back, the model answers.

mmengine serve --chat-template examples/tool_calls.jinja
python examples/tool_loop.py [http://localhost:8000/v1]

The included model was not trained on tool calls, so tool_choice forces its first answer to be a call.
"""

import json
import sys

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count_corners",
            "description": "How many corners a shape has.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"shape": {"enum": ["square", "triangle", "star"]}},
                "required": ["shape"],
                "additionalProperties": False,
            },
        },
    }
]
CORNERS = {"square": 4, "triangle": 3, "star": 10}


def main() -> None:
    address = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
    client = openai.OpenAI(base_url=address, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is a triangle?"}]
    for choice in ("required", "none"):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=0,
            max_completion_tokens=64,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = str(CORNERS[arguments["shape"]])
            print(f"{call.function.name}({arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
