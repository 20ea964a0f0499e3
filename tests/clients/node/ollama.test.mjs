// The official ollama package.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Ollama } from "ollama";
import { ASK, MODEL, N_EMBD, PARAMETERS, TOO_LONG, WEATHER, all, checkArguments, ollamaURL } from "./shared.mjs";

const client = new Ollama({ host: ollamaURL });
const GREEDY = { model: MODEL, messages: ASK, options: { temperature: 0, num_predict: 12 } };

test("a stream says what the whole reply says", async () => {
  const whole = await client.chat(GREEDY);
  assert.ok(whole.message.content && whole.done && whole.eval_count > 0);
  const lines = await all(await client.chat({ ...GREEDY, stream: true }));
  assert.equal(lines.map((line) => line.message.content).join(""), whole.message.content);
  assert.deepEqual(lines.map((line) => line.done), [...lines.slice(1).map(() => false), true]);
});

test("generate says what chat says", async () => {
  const { messages, ...rest } = GREEDY;
  const said = (await client.generate({ ...rest, prompt: ASK[0].content })).response;
  assert.equal(said, (await client.chat(GREEDY)).message.content);
  const lines = await all(await client.generate({ ...rest, prompt: ASK[0].content, stream: true }));
  assert.equal(lines.map((line) => line.response).join(""), said);
});

// Ollama's API cannot force a tool, but this model repeats what it was shown.
test("tools are called, whole and streamed, and their results answered", async () => {
  const question = (city) => ({ role: "user", content: `What is the weather in ${city}?` });
  const called = (city) => {
    return { role: "assistant", content: "", tool_calls: [{ function: { name: "get_weather", arguments: { city } } }] };
  };
  const shown = ["Rome", "Madrid"].flatMap((city) => [question(city), called(city)]);
  const options = { temperature: 0, num_predict: 60, repeat_penalty: 1 };
  const parameters = { type: "object", properties: { city: PARAMETERS.properties.city }, required: ["city"] };
  const tools = [{ ...WEATHER, function: { ...WEATHER.function, parameters } }];
  const ask = { ...GREEDY, messages: [...shown, question("Paris")], tools, options };
  const calls = (messages) => messages.flatMap((message) => message.tool_calls ?? []).map((call) => call.function);
  const whole = calls([(await client.chat(ask)).message]);
  assert.deepEqual(whole.map((call) => call.name), ["get_weather"]);
  assert.deepEqual(whole[0].arguments, { city: "Paris" });
  const lines = await all(await client.chat({ ...ask, stream: true }));
  assert.deepEqual(calls(lines.map((line) => line.message)), whole);
  const result = { role: "tool", tool_name: "get_weather", content: "Sunny, 21 degrees." };
  const messages = [question("Paris"), called("Paris"), result];
  assert.ok((await client.chat({ ...ask, messages })).message.content);
});

test("structured output", async () => {
  const options = { temperature: 0, num_predict: 100 };
  const reply = await client.chat({ ...GREEDY, options, format: PARAMETERS });
  checkArguments(JSON.parse(reply.message.content));
});

test("vectors", async () => {
  const { embeddings } = await client.embed({ model: MODEL, input: ["The cat sits.", "Interest rates rose."] });
  assert.deepEqual(embeddings.map((vector) => vector.length), [N_EMBD, N_EMBD]);
  assert.equal((await client.embeddings({ model: MODEL, prompt: "The cat sits." })).embedding.length, N_EMBD);
});

test("what there is", async () => {
  assert.ok((await client.list()).models.some((model) => model.model === `${MODEL}:latest`));
  assert.ok((await client.show({ model: MODEL })).capabilities.includes("tools"));
  assert.equal((await client.ps()).models.length, 1);
  assert.equal((await client.pull({ model: MODEL })).status, "success");
  assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
});

test("mistakes are the package's own errors", async () => {
  const cases = [
    [{ model: "nope" }, 404, "model 'nope' not found"],
    [{ think: true }, 400, "does not support thinking"],
    [{ messages: TOO_LONG }, 400, "maximum context length"],
  ];
  for (const [change, status, words] of cases) {
    for (const stream of [false, true]) {
      const error = await client.chat({ ...GREEDY, ...change, stream }).catch((error) => error);
      assert.equal(error.name, "ResponseError");
      assert.equal(error.status_code, status);
      assert.ok(error.message.includes(words), error.message);
    }
  }
});

test("a stream can be aborted", async () => {
  const stream = await client.chat({ ...GREEDY, options: { num_predict: 500 }, stream: true });
  await assert.rejects(async () => {
    for await (const line of stream) if (line.message.content) stream.abort();
  }, { name: "AbortError" });
  assert.ok((await client.chat(GREEDY)).message.content);
});
