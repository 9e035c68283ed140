"""Invalid calls of all APIs, as pairs (path, body), for tests of errors."""

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
_USER = {"role": "user", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
_BAD_SCHEMA = {"type": "zzz"}


def _chat(*parts, **fields):
    content = [{"type": "text", "text": "a"}, *parts] if parts else "a"
    return CHAT, {"messages": [_USER, {"role": "user", "content": content}], **fields}


def _image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def _responses(**fields):
    return RESPONSES, {"input": "a", **fields}


def _items(*items):
    return RESPONSES, {"input": [{"role": "user", "content": "a"}, *items]}


def _messages(**fields):
    return MESSAGES, {"max_tokens": 4, "messages": [_USER], **fields}


def _blocks(*blocks):
    return MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": list(blocks)}]}


_SHARED = (
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": -1},
    {"top_k": -7},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [10**6]},
    {"stop_token_ids": ["x"]},
    {"min_tokens": -1},
    {"priority": 2**40},
    {"cache_salt": "x" * 5000},
    {"deadline_s": -1},
    {"deadline_s": 10**12},
    {"request_id": "a b"},
    {"structured_outputs": {"jsn": 1}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}},
    {"structured_outputs": {"grammar": "start: ["}},
    {"structured_outputs": {"grammar": 'rot ::= "a"'}},
    {"structured_outputs": {"regex": 5}},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": "{"}},
    {"structured_outputs": {"json": _BAD_SCHEMA}},
    {"structured_outputs": {"json_object": 3}},
    {"structured_outputs": {"structural_tag": {"triggers": []}}},
    {"thinking_token_budget": -7},
    {"thinking_token_budget": 5},
    {"mm_processor_kwargs": {"local_files": True}},
    {"mm_processor_kwargs": {"do_resize": False}},
    {"mm_processor_kwargs": {"resized_height": 4}},
    {"zzz": 1},
    {"model": "gpt-5"},
)
_OPENAI = (
    {"n": 0},
    {"seed": "x"},
    {"presence_penalty": 7},
    {"frequency_penalty": -7},
    {"min_tokens": 9, "max_tokens": 5},
    {"stop": ["x"] * 20},
    {"stop": ["x" * 300]},
    {"logit_bias": {"5": 1000}},
    {"logit_bias": {"9999999": 1}},
    {"logit_bias": {"x": 1}},
    {"stream_options": {}},
    {"stream": True, "stream_options": {"include_obfuscation": 1}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"stream": True, "stream_options": {"zzz": True}},
    {"response_format": {"type": "zzz"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _BAD_SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 5}}},
    {"response_format": {"type": "json_object", "bounds": {"zzz": 1}}},
    {"response_format": {"type": "json_object", "on_truncation": "x"}},
    {"response_format": {"type": "json_object", "reasoning": 5}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"guided_json": {}},
    {"logprobs": 99},
    {"max_tokens": 0},
    {"max_tokens": "many"},
)
_PARTS = (
    {"type": "zzz"},
    _image("https://a.org/b.png"),
    _image("file:///etc/passwd"),
    _image("data:image/png;base64,"),
    _image("data:image/png;base64,AAAA"),
    _image("data:image/png,AAAA"),
    _image("nowhere"),
    _image("data:image/png;base64,AAAA", detail="x"),
    _image("data:image/png;base64,AAAA", zzz="x"),
    _image("file-" + "0" * 24),
    {"type": "image_url"},
    {"type": "image_url", "image_url": {}},
    {"type": "image", "path": "a.png"},
    {"type": "image", "image": "data:image/png;base64,AAAA", "min_pixels": -4},
    {"type": "image", "image": "data:image/png;base64,AAAA", "do_resize": False},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "text"},
    {"type": "text", "text": 5},
    "text",
)
_MESSAGES = (
    [],
    "a",
    [5],
    [{}],
    [{"role": "user"}],
    [{"role": 5, "content": "a"}],
    [_USER, {"role": "user", "content": 7}],
    [{"role": "user", "content": "\ud800"}],
    [_USER, {"role": "user", "content": "a", "tool_calls": []}],
    [_USER, {"role": "assistant", "content": "a", "tool_calls": 5}],
    [_USER, {"role": "assistant", "content": "a", "tool_calls": [{"type": "function"}]}],
    [_USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [_USER, {"role": "tool", "tool_call_id": 5, "content": "a"}],
    [{"role": "user", "content": "a" * 5000}],
)
_TOOLS = (
    {"tools": [{}]},
    {"tools": [_TOOL] * 200},
    {"tools": [_TOOL, _TOOL]},
    {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "strict": 5}}]},
    {"tools": [_TOOL], "tool_choice": "zzz"},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [_TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
    {"tools": [_TOOL], "parallel_tool_calls": 5},
    {"tool_choice": "required"},
)
_RESPONSES = (
    {"input": 5},
    {"max_output_tokens": 0},
    {"text": {"format": {"type": "zzz"}}},
    {"text": {"format": {"type": "json_schema", "name": "a", "schema": _BAD_SCHEMA}}},
    {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
    {"text": {"format": {"type": "json_object", "on_truncation": "x"}}},
    {"tools": [{"type": "zzz"}]},
    {"tools": [_TOOL]},
    {"tools": [{**_FLAT, "name": "a b"}]},
    {"tools": [_FLAT, _FLAT]},
    {"tools": [{**_FLAT, "zzz": 1}]},
    {"tools": [_FLAT], "tool_choice": {"type": "function", "name": "g"}},
    {"tools": [_FLAT], "tool_choice": {"type": "allowed_tools", "mode": "x"}},
    {"background": True, "store": False},
    {"background": True},
    {"store": True},
    {"previous_response_id": "resp_1"},
    {"include": ["zzz"]},
    {"top_logprobs": 2},
)
_ITEMS = (
    {"type": "zzz"},
    {"role": "zzz", "content": "a"},
    {"role": "user", "content": 5},
    {"role": "user", "content": [{"type": "zzz"}]},
    {"role": "user", "content": [{"type": "input_text"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "https://a.org/b.png"}]},
    {"role": "user", "content": [{"type": "input_image", "image_url": "a"}]},
    {"role": "user", "content": [{"type": "input_image", "file_id": "file-" + "0" * 24}]},
    {"role": "user", "content": [{"type": "input_image", "file_id": "x"}]},
    {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"},
    {"type": "function_call_output", "call_id": 5, "output": "a"},
    {"type": "item_reference", "id": "x"},
    {"type": "reasoning", "encrypted_content": "x"},
    {"role": "user", "content": "\ud800"},
)
_ANTHROPIC = (
    {"max_tokens": 0},
    {"max_tokens": None},
    {"stop": ["a"], "stop_sequences": ["b"]},
    {"stop_sequences": ["x"] * 20},
    {"thinking": {"type": "enabled"}},
    {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"tools": [{"name": "f"}]},
    {"tools": [{"name": "a b", "input_schema": {"type": "object"}}]},
    {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
    {"tools": [{"name": "f", "input_schema": {}, "zzz": 1}]},
    {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
    {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "zzz"}},
    {"output_config": {"format": {"type": "json_schema", "schema": _BAD_SCHEMA}}},
    {"output_config": {"format": {"type": "zzz"}}},
    {"system": 5},
    {"system": [{"type": "image"}]},
    {"messages": [{"role": "zzz", "content": "a"}]},
    {"messages": [{"role": "user", "content": "a", "zzz": 1}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": []},
)
_BLOCKS = (
    {"type": "zzz"},
    {"type": "text"},
    {"type": "text", "text": "a", "zzz": 1},
    {"type": "image", "source": {"type": "zzz"}},
    {"type": "image", "source": {"type": "url", "url": "https://a.org/b.png"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
    {"type": "image", "source": {"type": "base64", "media_type": "text/html", "data": "AAAA"}},
    {"type": "image", "source": {"type": "file", "file_id": "file-" + "0" * 24}},
    {"type": "tool_result", "tool_use_id": 5},
    {"type": "tool_use", "id": "a", "name": "f", "input": 5},
)
_PROMPTS = (
    [],
    5,
    ["a", 5],
    [10**7],
    [[10**7]],
    [1, -1],
    "a" * 5000,
    ["a", "b" * 5000],
    [97] * 5000,
    ["a"] * 2000,
    "",
    "\ud800",
)

CALLS = (
    *(_chat(**fields) for fields in (*_SHARED, *_OPENAI, *_TOOLS)),
    _chat(top_logprobs=2),
    _chat(top_logprobs=99, logprobs=True),
    _chat(continue_final_message=True, add_generation_prompt=True),
    _chat(chat_template_kwargs={"tools": 1}),
    _chat(chat_template_kwargs={"x": {"y": "\ud800"}}),
    *(_chat(part) for part in _PARTS),
    *((CHAT, {"messages": messages}) for messages in _MESSAGES),
    *((TEXT, {"prompt": "a", **fields}) for fields in (*_SHARED, *_OPENAI)),
    *((TEXT, {"prompt": prompt}) for prompt in _PROMPTS),
    (TEXT, {"messages": [_USER]}),
    *(_responses(**fields) for fields in (*_SHARED, *_RESPONSES)),
    *(_items(item) for item in _ITEMS),
    (RESPONSES, {"input": "a" * 5000}),
    *(_messages(**fields) for fields in (*_SHARED, *_ANTHROPIC)),
    *(_blocks(block) for block in _BLOCKS),
    (MESSAGES, {"max_tokens": 4, "messages": [{"role": "user", "content": "a" * 5000}]}),
    (COUNT, {"messages": [{"role": "user", "content": "a" * 5000}]}),
    (COUNT, {"messages": 5}),
    (TOKENIZE, {}),
    (TOKENIZE, {"prompt": "a", "messages": [_USER]}),
    (TOKENIZE, {"messages": [{"role": "user", "content": [_image("data:image/png;base64,AAAA")]}]}),
    (DETOKENIZE, {"tokens": [-1]}),
    (DETOKENIZE, {"tokens": ["a"]}),
    (DETOKENIZE, {"tokens": [10**8]}),
    (CHAT, b"5"),
    (CHAT, b"{"),
    (CHAT, b"[]"),
    (CHAT, {}),
    ("/v1/nowhere", {}),
    ("/v1/files", {}),
    ("/v1/sessions/none/append", {}),
)
