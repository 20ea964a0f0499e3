// Real endpoints and nodes for the tests. BATON names the binary.
import { spawn } from 'node:child_process';
import { createInterface } from 'node:readline';

export const BATON = process.env.BATON ?? new URL('../../target/release/baton', import.meta.url).pathname;

/** A running process of the binary. */
class Running {
  constructor(process, said) {
    this.process = process;
    this.said = said;
  }

  /** Ends it at once, as a crash or a pulled plug does. */
  async kill() {
    await this.#end('SIGKILL');
  }

  async stop() {
    await this.#end('SIGTERM');
  }

  async #end(signal) {
    if (this.process.exitCode !== null || this.process.signalCode !== null) return;
    const ended = new Promise((resolve) => this.process.once('exit', resolve));
    this.process.kill(signal);
    await ended;
  }
}

/** Starts a process with these variables and waits until a line that it prints contains `ready`. */
async function start(args, ready, variables) {
  const env = { ...process.env, BATON_CLUSTER_KEY: "the page's cluster key", ...variables };
  const child = spawn(BATON, args, { env, stdio: ['ignore', 'pipe', 'pipe'] });
  const said = [];
  const isReady = new Promise((resolve, reject) => {
    for (const stream of [child.stdout, child.stderr]) {
      createInterface({ input: stream }).on('line', (line) => {
        said.push(line);
        if (line.includes(ready)) resolve();
      });
    }
    child.once('exit', (code) => reject(new Error(`baton ${args.join(' ')} ended with ${code}: ${said.join('\n')}`)));
  });
  await isReady;
  return new Running(child, said.join('\n'));
}

/** All processes that a test has started. */
export class Cluster {
  #running = [];

  /** A node; `url` is where it listens. */
  async node(...args) {
    return this.nodeWith({}, ...args);
  }

  /** The same with variables of its own. */
  async nodeWith(variables, ...args) {
    const listen = args.includes('--listen') ? [] : ['--listen', '127.0.0.1:0'];
    const node = await start(['node', '--threads', '1', ...listen, ...args], ' is ready on ', variables);
    node.url = `http://${node.said.split(' is ready on ')[1].split(/\s/)[0]}`;
    this.#running.push(node);
    return node;
  }

  /** An endpoint; `url` is the page's address. */
  async serve(...args) {
    return this.serveWith({}, ...args);
  }

  /** The same with variables of its own. */
  async serveWith(variables, ...args) {
    const listen = args.includes('--listen') ? [] : ['--listen', '127.0.0.1:0'];
    const endpoint = await start(['serve', '--threads', '1', ...listen, ...args], 'Stop with', variables);
    endpoint.url = endpoint.said.match(/^Baton serves .* at (http\S+?)\/v1\b/m)[1];
    this.#running.push(endpoint);
    return endpoint;
  }

  async stop() {
    await Promise.all(this.#running.map((running) => running.stop()));
  }
}

/** Sends a chat and waits for its end. */
export async function chat(url, prompt, options = {}) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: 'POST',
    body: JSON.stringify({ messages: [{ role: 'user', content: prompt }], max_tokens: 8, ...options }),
    ...(options.signal ? { signal: options.signal } : {}),
  });
  return response.text();
}

/** A text of about `n` tokens, which no cache has: the words of a counter. */
export function longText(n, seed) {
  return Array.from({ length: n }, (_, i) => `${seed}${(i * 7919) % 9973}`).join(' ');
}
