// Calls of clients from npm, run by `python -m benchmarks.clients`: node calls.mjs NAME URL.
// Each function compares what the client returns with the server's own answer to a plain request.
import assert from "node:assert/strict";

const PROMPT = "def fib(n):", KEY = "none", NUM_TOKENS = 24;
const MESSAGES = [{ role: "user", content: PROMPT }];
const LONG = "x = 1\n".repeat(5000); // longer than the context
const SCHEMA = {
  type: "object",
  properties: { name: { enum: ["fib", "sum"] }, count: { enum: [1, 2, 3] } },
  required: ["name", "count"],
  additionalProperties: false,
};

async function plain(url, path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  return (await fetch(url + path, options)).json();
}

async function modelOf(url) {
  return (await plain(url, "/v1/models")).data[0].id;
}

async function expectedChat(url) {
  const body = { messages: MESSAGES, max_tokens: NUM_TOKENS, temperature: 0 };
  return (await plain(url, "/v1/chat/completions", body)).choices[0].message.content;
}

function checkChoice(found) {
  const choice = typeof found === "string" ? JSON.parse(found) : found;
  assert.ok(["fib", "sum"].includes(choice.name) && [1, 2, 3].includes(choice.count), JSON.stringify(found));
}

async function openai(url) {
  const { default: OpenAI, BadRequestError } = await import("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: KEY });
  const [model, expected] = [await modelOf(url), await expectedChat(url)];
  const options = { model, messages: MESSAGES, max_tokens: NUM_TOKENS, temperature: 0 };
  const answer = await client.chat.completions.create(options);
  assert.equal(answer.choices[0].message.content, expected);
  let text = "";
  for await (const event of await client.chat.completions.create({ ...options, stream: true })) {
    text += event.choices[0]?.delta?.content ?? "";
  }
  assert.equal(text, expected);
  const response_format = { type: "json_schema", json_schema: { name: "x", schema: SCHEMA } };
  const typed = { ...options, max_tokens: 99, response_format };
  checkChoice((await client.chat.completions.create(typed)).choices[0].message.content);
  const tools = [{ type: "function", function: { name: "choose", parameters: SCHEMA } }];
  const forced = { ...options, max_tokens: 99, tools, tool_choice: "required" };
  const call = await client.chat.completions.create(forced);
  checkChoice(call.choices[0].message.tool_calls[0].function.arguments);
  const asked = { model, input: PROMPT, max_output_tokens: NUM_TOKENS, temperature: 0 };
  assert.equal((await client.responses.create(asked)).output_text, expected);
  await assert.rejects(
    client.completions.create({ model, prompt: LONG }),
    (error) => error instanceof BadRequestError && error.code === "context_length_exceeded",
  );
}

async function anthropic(url) {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: KEY });
  const [model, expected] = [await modelOf(url), await expectedChat(url)];
  const options = { model, messages: MESSAGES, max_tokens: NUM_TOKENS, temperature: 0 };
  assert.equal((await client.messages.create(options)).content[0].text, expected);
  const stream = client.messages.stream(options);
  assert.equal(await stream.finalText(), expected);
  const tools = [{ name: "choose", input_schema: SCHEMA }];
  const forced = { ...options, max_tokens: 99, tools, tool_choice: { type: "any" } };
  const { content } = await client.messages.create(forced);
  checkChoice(content.find((block) => block.type === "tool_use").input);
  const counted = await client.messages.countTokens({ model, messages: MESSAGES });
  assert.ok(counted.input_tokens > 0);
}

async function ai(url) {
  const lib = await import("ai");
  const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
  const { createOpenAI } = await import("@ai-sdk/openai");
  const { createAnthropic } = await import("@ai-sdk/anthropic");
  const [name, expected] = [await modelOf(url), await expectedChat(url)];
  const at = { baseURL: `${url}/v1`, apiKey: KEY };
  const compatible = createOpenAICompatible({
    ...at,
    name: "jspec",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
  const models = {
    compatible: compatible(name),
    chat: createOpenAI(at).chat(name),
    responses: createOpenAI(at).responses(name),
    anthropic: createAnthropic(at)(name),
  };
  const schema = lib.jsonSchema(SCHEMA);
  for (const [kind, model] of Object.entries(models)) {
    const options = { model, prompt: PROMPT, temperature: 0, maxRetries: 0 };
    const answer = await lib.generateText({ ...options, maxOutputTokens: NUM_TOKENS });
    assert.equal(answer.text, expected, kind);
    const stream = lib.streamText({ ...options, maxOutputTokens: NUM_TOKENS });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, expected, kind);
    assert.ok((await stream.usage).outputTokens > 0, kind);
    const tools = { choose: lib.tool({ description: "", inputSchema: schema }) };
    const forced = { ...options, maxOutputTokens: 99, tools, toolChoice: "required" };
    checkChoice((await lib.generateText(forced)).toolCalls[0].input);
    if (kind !== "anthropic") {
      const typed = { ...options, maxOutputTokens: 99, output: lib.Output.object({ schema }) };
      checkChoice((await lib.generateText(typed)).output);
    }
  }
}

const calls = { openai, ai, "@anthropic-ai/sdk": anthropic };
await calls[process.argv[2]](process.argv[3]);
