// Streams one answer with the openai package (npm install openai). Usage: node examples/chat.mjs "Why is the sky blue?"
import OpenAI from "openai";

const client = new OpenAI({
  baseURL: process.env.BATON_URL ?? "http://127.0.0.1:8080/v1",
  apiKey: process.env.BATON_API_KEY ?? "none",
});
const stream = await client.chat.completions.create({
  model: process.env.BATON_MODEL ?? "smollm2",
  messages: [{ role: "user", content: process.argv[2] ?? "Why is the sky blue?" }],
  stream: true,
});
for await (const chunk of stream) process.stdout.write(chunk.choices[0].delta.content ?? "");
process.stdout.write("\n");
