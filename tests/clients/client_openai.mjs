// Checks for the Node package openai.

import { readFileSync } from "node:fs";
import OpenAI, { BadRequestError, NotFoundError } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE_URL, IMAGE_URL, MODEL, QUESTION, SMALL_URL, assert, check, fullQueue, needsTools, run } from "./checks.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none" });
const messages = [{ role: "user", content: QUESTION }];
const Shape = z.object({ colour: z.enum(["red", "blue"]), isLarge: z.boolean() });
const tools = [
  {
    type: "function",
    function: {
      name: "paint",
      parameters: { type: "object", properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"], additionalProperties: false },
    },
  },
];
const create = (fields) => client.chat.completions.create({ model: MODEL, messages, ...fields });

check("chat", async () => assert((await create({})).choices[0].message.content));

check("streams", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages, stream_options: { include_usage: true } });
  let said = "";
  for await (const chunk of stream) said += chunk.choices[0]?.delta?.content ?? "";
  assert(said && said === (await stream.finalContent()) && (await stream.totalUsage()).total_tokens);
});

check("images", async () => {
  const content = [{ type: "image_url", image_url: { url: IMAGE_URL } }, { type: "text", text: "What is this?" }];
  assert((await create({ messages: [{ role: "user", content }] })).usage.prompt_tokens_details.image_tokens);
});

check("structured output", async () => {
  const response_format = zodResponseFormat(Shape, "shape");
  const found = await client.chat.completions.parse({ model: MODEL, messages, response_format });
  Shape.parse(found.choices[0].message.parsed);
});

check("tools in a loop", async () => {
  needsTools();
  const said = (await create({ tools, tool_choice: "required" })).choices[0];
  assert(said.finish_reason === "tool_calls");
  const results = said.message.tool_calls.map((call) => {
    assert(JSON.parse(call.function.arguments).colour);
    return { role: "tool", tool_call_id: call.id, content: "painted" };
  });
  const again = await create({ messages: [...messages, said.message, ...results], tools, tool_choice: "none" });
  assert(again.choices[0].message.content);
});

check("embeddings", async () => {
  const expected = JSON.parse(readFileSync(process.env.EXPECTED, "utf8"));
  const embedder = new OpenAI({ baseURL: process.env.EMBED_URL, apiKey: "none" });
  for (const [fields, wanted] of [[{}, expected.vectors], [{ encoding_format: "float", dimensions: expected.dimensions }, expected.short]]) {
    const found = await embedder.embeddings.create({ model: MODEL, input: expected.texts, ...fields });
    assert(found.data.length === wanted.length);
    found.data.forEach(({ embedding }, row) => {
      assert(embedding.length === wanted[row].length && embedding.every((each, at) => Math.abs(each - wanted[row][at]) < 1e-5));
    });
  }
});

check("errors", async () => {
  for (const [fields, kind] of [[{ model: "nobody" }, NotFoundError], [{ temperature: -1 }, BadRequestError]]) {
    const error = await create(fields).then(() => null, (found) => found);
    assert(error instanceof kind && error.type && error.param, String(error));
  }
});

check("retries", () =>
  fullQueue(async () => {
    const small = new OpenAI({ baseURL: SMALL_URL, apiKey: "none" });
    const found = await small.chat.completions.create({ model: MODEL, messages, max_tokens: 2 });
    assert(found.choices[0].message.content);
  }),
);

await run();
