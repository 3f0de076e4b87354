// Vercel's AI SDK against a gateway: `node vercel_ai.mjs BASE_URL MODEL CASE`, with what is asked as JSON on stdin.
// It prints one JSON object: what came of it.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, modelName, wanted] = process.argv.slice(2);
const chunks = [];
for await (const chunk of process.stdin) chunks.push(chunk);
const given = JSON.parse(Buffer.concat(chunks).toString());

const provider = createOpenAICompatible({
  name: "baton",
  baseURL,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(modelName);
const common = { model, temperature: 0, maxRetries: 0 };
const forced = { ...common, frequencyPenalty: given.frequency_penalty, maxOutputTokens: 300 };

const look_up = tool({
  description: given.tool.function.description,
  inputSchema: jsonSchema(given.tool.function.parameters),
  execute: async () => given.tool_result,
});
const agent = {
  tools: { look_up },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
};

const collect = async (stream) => {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
};

const cases = {
  async generateText() {
    const { text, usage, finishReason } = await generateText({ ...common, prompt: given.prompt });
    return { text, usage, finishReason };
  },
  async streamText() {
    const result = streamText({ ...common, prompt: given.prompt });
    const parts = await collect(result.textStream);
    return { parts, usage: await result.usage, finishReason: await result.finishReason };
  },
  async completion() {
    const completing = provider.completionModel(modelName);
    const { text } = await generateText({ ...common, model: completing, prompt: given.prompt, maxOutputTokens: 8 });
    return { text };
  },
  // The first step must call, the second answers with the result.
  async tools() {
    const { text, steps } = await generateText({ ...forced, ...agent, prompt: given.question });
    return { text, calls: steps.map((step) => step.toolCalls), reasons: steps.map((step) => step.finishReason) };
  },
  async streamTools() {
    const result = streamText({ ...forced, ...agent, prompt: given.question });
    const kinds = (await collect(result.fullStream)).map((part) => part.type);
    const steps = await result.steps;
    return { text: await result.text, kinds, calls: steps.map((step) => step.toolCalls) };
  },
  async generateObject() {
    const { object } = await generateObject({ ...forced, prompt: given.prompt, schema: jsonSchema(given.schema) });
    return { object };
  },
  async streamObject() {
    const result = streamObject({ ...forced, prompt: given.prompt, schema: jsonSchema(given.schema) });
    await collect(result.partialObjectStream);
    return { object: await result.object };
  },
  // The model may write entries until its length; then the object is none.
  async record() {
    const schema = z.object({ codes: z.record(z.string(), z.number()) });
    const answer = await generateObject({ ...forced, prompt: given.prompt, schema }).catch((caught) => caught);
    return { error: answer instanceof Error ? answer.name : null };
  },
  async fields() {
    const providerOptions = { baton: { reasoningEffort: "low" } };
    const cut = await generateText({ ...common, prompt: given.prompt, maxOutputTokens: 2, seed: 1, providerOptions });
    const stopped = await generateText({ ...common, prompt: given.prompt, stopSequences: ["1"] });
    return [cut, stopped].map(({ text, finishReason }) => ({ text, finishReason }));
  },
  // A stream that its reader leaves.
  async abort() {
    const leaving = new AbortController();
    const providerOptions = { baton: { ignore_eos: true } };
    const result = streamText({ ...common, prompt: given.prompt, providerOptions, abortSignal: leaving.signal });
    const kinds = [];
    for await (const part of result.fullStream) {
      kinds.push(part.type);
      if (part.type === "text-delta") leaving.abort();
    }
    return { kinds };
  },
  async errors() {
    const failures = [];
    const asked = [
      { ...common, model: provider("other"), prompt: given.prompt },
      { ...common, prompt: given.prompt, topP: 2 },
      { ...common, prompt: given.too_long },
    ];
    for (const each of asked) {
      const error = await generateText(each).catch((caught) => caught);
      const { name, statusCode, isRetryable, message, data } = error;
      failures.push({ name, statusCode, isRetryable, message, code: data.error.code });
    }
    return failures;
  },
};

console.log(JSON.stringify(await cases[wanted]()));
