// The real model on two nodes: a chat, the waterfall of its handoff, and what a lost node looks like.
import { chat, longText } from './cluster.mjs';
import { expect, row, test } from './browser.mjs';

// `make test` names the default model in a type that is computed in half the time.
const MODEL = ['--model', process.env.BATON_TEST_MODEL ?? 'smollm2', '--name', 'smollm2'];

test('a chat is handed over, and the page shows where its time went', async ({ page, problems, cluster }) => {
  test.setTimeout(180_000);
  const prefill = await cluster.node('--role', 'prefill', ...MODEL);
  const { url } = await cluster.serve(...MODEL, '--prefill', prefill.url, '--policy', 'always_handoff');
  await page.goto(url);
  // Without measured rates nothing is predicted.
  await expect(page.locator('.link')).toContainText(/[MG]B\/s/, { timeout: 60_000 });
  for (const [name, rate] of [['prefill-1', 'Prefill'], ['local', 'Prefill'], ['local', 'Decode']]) {
    const measured = page.locator('.machine', { hasText: name }).locator('.facts > div', { hasText: rate });
    await expect(measured).toContainText('tok/s', { timeout: 60_000 });
  }
  await page.getByRole('navigation').getByRole('link', { name: 'Try it' }).click();
  await page.getByLabel('Message', { exact: true }).fill(`Summarise: ${longText(200, 'b')}`);
  await page.getByText('Settings').click();
  await page.getByLabel('Most tokens').fill('24');
  await page.getByRole('button', { name: 'Send' }).click();
  const reply = page.locator('.turn.assistant');
  // A busy machine takes its time for the prompt.
  await expect(reply.locator('.text')).not.toBeEmpty({ timeout: 90_000 });
  await expect(reply.locator('.route-of')).toContainText('prefill-1 → local');
  await expect(reply.locator('.route-of')).toContainText('first token');
  await expect(page.getByRole('button', { name: 'Send' })).toBeVisible();

  await page.getByRole('link', { name: 'Overview' }).click();
  const newest = page.locator('.request').first();
  await expect(newest).toContainText('prefill-1 → local');
  await expect(newest).toContainText('Done');
  await newest.getByRole('button').press('Enter');
  const lanes = newest.locator('.waterfall');
  for (const lane of ['Prompt and plan', 'Prefill on prefill-1', 'Transfer', 'Import', 'First token on local', 'Decode', 'Predicted']) {
    await expect(lanes).toContainText(lane);
  }
  await expect(newest.locator('.details')).toContainText(/handed over \([\d.]+ [KM]iB\)/);
  await expect(newest.locator('.details')).toContainText('predicted');
  await expect(page.locator('.link')).toContainText('KV: same weights');
  // Measured against what the plan said of the endpoint's own machine.
  await expect(newest.locator('.gained')).toHaveText(/^(saved|lost) [\d.]+ (ms|s)local alone: [\d.]+ (ms|s), predicted$/);
  await expect(page.locator('.saved')).toContainText(/(saved|lost) in the last hour by 1 handoff,/);
  expect(problems).toEqual([]);
});

test('a reply can be stopped, and its text stays', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim', '--sim-decode-tps', '20');
  await page.goto(`${url}/#try`);
  await page.getByLabel('Message', { exact: true }).fill('Go on for a long time.');
  await page.getByLabel('Message', { exact: true }).press('Enter');
  await expect(page.locator('.turn.assistant .text')).not.toBeEmpty();
  await page.getByRole('button', { name: 'Stop' }).click();
  await expect(page.locator('.turn.assistant')).toContainText('stopped');
  await expect(page.locator('.turn.assistant .text')).not.toBeEmpty();
  await page.getByRole('link', { name: 'Overview' }).click();
  await expect(row(page, 'Client left')).toBeVisible();
  expect(problems).toEqual([]);
});

test('a node that dies during a handoff is a fallback with its reason, and comes back', async ({ page, problems, cluster }) => {
  const sim = ['--engine', 'sim', '--name', 'sim', '--sim-prefill-tps', '400', '--sim-decode-tps', '200'];
  const first = await cluster.node('--role', 'prefill', ...sim);
  const { url } = await cluster.serve(...sim, '--prefill', first.url, '--policy', 'always_handoff', '--no-calibration');
  await page.goto(url);
  await expect(page.locator('.machine', { hasText: 'prefill-1' })).toContainText('Ready');

  // The simulator's tokens are bytes, so this prefill takes some seconds.
  const reply = chat(url, longText(400, 'c'), { model: 'sim' });
  const running = page.locator('.request.running');
  await expect(running.locator('.outcome')).toContainText('Handing over');
  await expect(running).toContainText('prefill-1 → local');
  // The picture shows which machine computes, and that KV crosses.
  await expect(page.locator('.site', { hasText: 'prefill-1' })).toContainText(/computes 1 prompt, [\d,]+ tok/);
  await expect(page.locator('.sites .kv')).toContainText('KV crosses');
  await first.kill();
  await reply;

  const fell = row(page, 'Fell back');
  await expect(fell).toContainText('fell back: prefill node lost');
  await fell.getByRole('button').click();
  await expect(fell.locator('.details')).toContainText('Fell back: the prefill node was lost during the handoff (prefill_lost)');
  await expect(fell.locator('.span.broken')).not.toHaveCount(0);
  await expect(page.locator('.modelrow')).toContainText('prefill node lost × 1');

  const card = page.locator('.machine', { hasText: 'prefill-1' });
  await expect(card).toHaveClass(/down/);
  await expect(card).toContainText('Lost');
  await expect(card).toContainText('Gone for');
  await expect(page.locator('.link')).toHaveClass(/lost/);
  await expect(page.locator('.sites .gone')).toContainText('lost');
  await expect(page.locator('.site.down')).toContainText('prefill-1');
  await expect(page.locator('.link')).toContainText('No handoffs: prefill-1 cannot be reached');
  await expect(page.locator('.notice.bad')).toContainText('prefill-1 is lost');

  // Not handed over, and why.
  await chat(url, 'short', { model: 'sim' });
  const direct = page.locator('.request').first();
  await expect(direct).toContainText('Done');
  await expect(direct).toContainText(/prefill node (not reachable|lost)/);
  await direct.getByRole('button').click();
  await expect(direct.locator('.details')).toContainText('not handed over, because the prefill node');

  await cluster.node('--role', 'prefill', ...sim, '--listen', first.url.replace('http://', ''));
  await expect(card).toContainText('Ready');
  await expect(page.locator('.notice.bad')).toHaveCount(0);
  expect(problems).toEqual([]);
});

test('the page says when the endpoint is gone, and finds it again', async ({ page, problems, cluster }) => {
  const args = ['--engine', 'sim', '--name', 'sim'];
  const first = await cluster.serve(...args);
  await page.goto(first.url);
  await expect(page.locator('.pill')).toHaveText('Live');
  await first.kill();
  await expect(page.getByRole('alert')).toContainText('Connection lost.');
  await expect(page.locator('.machine')).toContainText('local');
  const port = new URL(first.url).port;
  // Clicked while nothing listens: a page that finds the endpoint by itself has no such button any more.
  await page.getByRole('button', { name: 'Try now' }).click();
  await expect(page.getByRole('alert')).toContainText('Connection lost.');
  await cluster.serve(...args, '--listen', `127.0.0.1:${port}`);
  await expect(page.locator('.pill')).toHaveText('Live');
  expect(problems).toEqual([]);
});
