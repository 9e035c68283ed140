// Checks for Vercel's package ai with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { BASE_URL, IMAGE_URL, MODEL, QUESTION, SMALL_URL, TAUGHT, assert, check, fullQueue, needsTools, run } from "./checks.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const provider = (baseURL) =>
  createOpenAICompatible({ name: "mmengine", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
const model = provider(BASE_URL)(MODEL);
const Shape = z.object({ colour: z.enum(["red", "blue"]), isLarge: z.boolean() });
const paint = tool({
  description: "Paint.",
  inputSchema: z.object({ colour: z.enum(["red", "blue"]) }),
  execute: async ({ colour }) => `painted in ${colour}`,
});

check("chat", async () => {
  const found = await generateText({ model, prompt: QUESTION });
  assert(found.text && found.usage.outputTokens && found.finishReason === "stop");
});

check("streams", async () => {
  const found = streamText({ model, prompt: QUESTION, onError: () => {} });
  let said = "";
  for await (const piece of found.fullStream) {
    if (piece.type === "error") throw piece.error;
    if (piece.type === "text-delta") said += piece.text;
  }
  assert(said && (await found.usage).totalTokens && (await found.finishReason) === "stop");
});

check("images", async () => {
  const content = [{ type: "text", text: "What is this?" }, { type: "image", image: IMAGE_URL }];
  assert((await generateText({ model, messages: [{ role: "user", content }] })).text);
});

check("structured output: generateObject", async () => {
  Shape.parse((await generateObject({ model, schema: Shape, prompt: QUESTION })).object);
});

check("structured output: without a schema", async () => {
  const content = [{ type: "image", image: IMAGE_URL }, { type: "text", text: TAUGHT }];
  const messages = [{ role: "user", content }];
  const object = (await generateObject({ model, output: "no-schema", messages })).object;
  assert(typeof object === "object");
});

check("structured output: streamObject", async () => {
  const found = streamObject({ model, schema: Shape, prompt: QUESTION });
  for await (const _ of found.partialObjectStream);
  Shape.parse(await found.object);
});

check("structured output: generateText", async () => {
  const found = await generateText({ model, prompt: QUESTION, output: Output.object({ schema: Shape }) });
  Shape.parse(found.output);
});

const calling = {
  model,
  prompt: QUESTION,
  tools: { paint },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

check("tools in a loop", async () => {
  needsTools();
  const found = await generateText(calling);
  assert(found.steps.length === 2 && found.steps[0].toolResults.length && found.text);
});

check("tools in a loop: streamed", async () => {
  needsTools();
  const found = streamText({ ...calling, onError: () => {} });
  const kinds = new Set();
  for await (const piece of found.fullStream) {
    if (piece.type === "error") throw piece.error;
    kinds.add(piece.type);
  }
  assert(kinds.has("tool-input-delta") && kinds.has("tool-result") && (await found.text));
});

check("errors", async () => {
  const error = await generateText({ model, prompt: QUESTION, temperature: -1 }).then(() => null, (found) => found);
  assert(APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("temperature"), String(error));
  const found = streamText({ model: provider(BASE_URL)("nobody"), prompt: QUESTION, onError: () => {} });
  const kinds = [];
  for await (const piece of found.fullStream) kinds.push(piece.type);
  assert(kinds.includes("error"), kinds.join());
});

check("retries", () =>
  fullQueue(async () => {
    const found = await generateText({ model: provider(SMALL_URL)(MODEL), prompt: QUESTION, maxOutputTokens: 2 });
    assert(found.text);
  }),
);

await run();
