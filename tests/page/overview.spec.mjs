// Numbers of the overview that a small cluster has too seldom: the states are made up.
import { answerStreams, expect, row, test } from './browser.mjs';

const SIM = ['--engine', 'sim', '--name', 'sim'];
const NOTHING = { seconds: 10, running: 0, waiting: 0, ended: 0, failed: 0, generated_tokens: 0, prompt_tokens: 0, cached_tokens: 0, handoff_tokens: 0, first_token_ms: null, itl_ms: null };

function request(i, changes = {}) {
  return {
    at_ms: Date.now() - i, request_id: `r${i}`, model: 'sim', decode: 'local', prefill: null, policy: 'auto', reason: 'only_route',
    n_prompt: 10, n_cached: 0, n_completion: 5, admitted_ms: 1, before_plan_ms: 400, slot_ms: 410, predicted: null,
    predicted_direct_ttft_ms: null, ttft_ms: 100, e2e_ms: 900, handoff: null, outcome: null, ...changes,
  };
}

test('a value between missing ones is a dot, and the legend says how old it is', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const now = Date.now();
  const history = Array.from({ length: 12 }, (_, i) => ({ ...NOTHING, at_ms: now - (11 - i) * 10_000 }));
  history[6].first_token_ms = { p50: 120, p95: 120, p99: 120 };
  await answerStreams(page, { history });
  await page.emulateMedia({ colorScheme: 'light' });
  await page.goto(url);
  const chart = page.locator('.chart', { hasText: 'Time to first token' });
  await expect(chart).toContainText('p50 120 ms, 50 s ago');
  await expect(page.locator('.chart', { hasText: 'Time between tokens' })).toContainText('p50 none');
  const isDrawn = () =>
    chart.locator('canvas').evaluate((canvas) => {
      const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
      // p99 is drawn last: --red.
      return data.some((_, i) => i % 4 === 0 && data[i] === 0xbf && data[i + 1] === 0x23 && data[i + 2] === 0x39);
    });
  await expect.poll(isDrawn).toBe(true);
  expect(problems).toEqual([]);
});

test('the heading counts all requests, and says how many are listed', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const open = Array.from({ length: 128 }, (_, i) => request(i));
  await answerStreams(page, { open, requests: { running: 60, slots: 60, limit: 60, waiting: 90 } });
  await page.goto(url);
  await expect(page.locator('#requests')).toContainText('60 running, 90 waiting (128 of 150 are listed), the last 0');
  expect(problems).toEqual([]);
});

test('the time to the first token begins with the arrival, its prediction with the plan', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const predicted = { queue_ms: 0, prefill_ms: 90, wire_ms: 0, after_prefill_ms: 0, step_ms: 10, ttft_ms: 90, completion_ms: 130 };
  await answerStreams(page, { routes: [request(1, { outcome: 'done', predicted })] });
  await page.goto(url);
  const done = row(page, 'Done');
  await expect(done.locator('.ttft')).toHaveText('500 mspredicted 90 ms from the plan');
  await done.getByRole('button').click();
  await expect(done.locator('.details')).toContainText('500 ms from arrival; 100 ms from the plan, predicted 90 ms from the plan (11 % slower than predicted)');
  expect(problems).toEqual([]);
});

test('a handoff and a direct reply are bars on one axis, and what was saved stands beside them and in the sum', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const handoff = {
    n_tokens: 8000, n_cached: 0, n_computed: 8000, n_bytes: 1e9, queue_ms: 0, prefill_ms: 1500, transfer_ms: 1450, import_ms: 0,
    after_prefill_ms: 100, during_prefill_ms: 1400, total_ms: 1600,
  };
  const times = { n_completion: 33, before_plan_ms: 0, slot_ms: 0, outcome: 'done' };
  const handed = request(1, { ...times, prefill: 'prefill-1', decode: 'decode-1', handoff, ttft_ms: 1600, e2e_ms: 2400, predicted_direct: { node: 'decode-1', ttft_ms: 5600, step_ms: 25 }, saved_ms: 4000 });
  const unpredicted = request(2, { ...times, prefill: 'prefill-1', decode: 'decode-1', handoff, ttft_ms: 1600, e2e_ms: 2400 });
  const slower = request(3, { ...times, prefill: 'prefill-1', decode: 'decode-1', handoff, ttft_ms: 1600, e2e_ms: 2400, predicted_direct: { node: 'decode-2', ttft_ms: 1000, step_ms: 25 }, saved_ms: -600 });
  const direct = request(4, { ...times, decode: 'decode-1', ttft_ms: 5600, e2e_ms: 6400 });
  // A closed sample has requests that the list has forgotten; those that ended before its end are not counted twice.
  const history = [{ ...NOTHING, at_ms: Date.now() - 60_000, compared: 2, saved_ms: 5600 }];
  await answerStreams(page, { routes: [handed, unpredicted, slower, direct], history });
  await page.goto(url);
  await expect(page.locator('.saved')).toHaveText('9.00 s saved in the last hour by 4 handoffs, measured against the predicted time of the best machine alone');
  const of = (i) => page.locator('.request').nth(i);
  await expect(of(0).locator('.gained')).toHaveText('saved 4.00 sdecode-1 alone: 6.40 s, predicted');
  await expect(of(1).locator('.gained')).toHaveText('–one machine alone: not predicted');
  await expect(of(2).locator('.gained')).toHaveText('lost 600 msdecode-2 alone: 1.80 s, predicted');
  await expect(of(3).locator('.gained')).toHaveText('–');
  const right = async (i, lane) => {
    const bar = await of(i).locator('.bar.compared').boundingBox();
    const spans = await of(i).locator(`.lane-of.${lane} .span`).all();
    const boxes = await Promise.all(spans.map((span) => span.boundingBox()));
    return (Math.max(...boxes.map(({ x, width }) => x + width)) - bar.x) / bar.width;
  };
  // The axis ends at 8 s.
  await expect(page.locator('.axis')).toHaveText('02 s4 s6 s8 s');
  expect(await right(0, 'main')).toBeCloseTo(2.4 / 8, 2);
  expect(await right(0, 'alone')).toBeCloseTo(6.4 / 8, 2);
  expect(await right(3, 'main')).toBeCloseTo(6.4 / 8, 2);
  await expect(of(3).locator('.lane-of')).toHaveCount(1);
  const hidden = await of(0).locator('.lane-of.under .span').boundingBox();
  const prefill = await of(0).locator('.main .span.prefill').first().boundingBox();
  expect(hidden.y, 'the hidden transfer lies under the prefill').toBeGreaterThanOrEqual(prefill.y + prefill.height);
  expect(hidden.x + hidden.width).toBeCloseTo(prefill.x + prefill.width, 0);
  expect(problems).toEqual([]);
});

test('what came back from a store is in the waterfall and in the facts', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const sources = { slot: 200, memory: 600, disk: 100, pulled: 0, computed: 100 };
  await answerStreams(page, { routes: [request(1, { outcome: 'done', n_prompt: 1000, n_cached: 900, sources, restore_ms: 5 })] });
  await page.goto(url);
  const done = row(page, 'Done');
  await done.getByRole('button').click();
  await expect(done.locator('.waterfall')).toContainText('Restore on local');
  await expect(done.locator('.details')).toContainText('200 cached in a slot, 600 restored from memory, 100 restored from disk');
  expect(problems).toEqual([]);
});

test('refused requests say why, drive out no others, and requests for vectors count these', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const nothing = { decode: '', reason: '', n_prompt: 0, n_completion: 0, slot_ms: null, ttft_ms: null };
  const refused = Array.from({ length: 70 }, (_, i) => request(i, { ...nothing, outcome: 'refused', error: 'queue_full' }));
  const vectors = request(80, { reason: '', ttft_ms: null, n_completion: 0, n_vectors: 3, outcome: 'done' });
  await answerStreams(page, { routes: [...refused, vectors] });
  await page.goto(url);
  await expect(page.locator('#requests')).toContainText('the last 17');
  await expect(row(page, 'Refused').first()).toContainText('no routequeue full');
  await expect(row(page, 'Done')).toContainText('10 → 3 vectors');
  expect(problems).toEqual([]);
});

test('what was found in the network is listed with its reason, whatever it calls itself', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  const at = (address, state) => ({ address, state });
  const found = [
    { name: 'spark', state: 'used', reason: 'used', role: 'prefill', node: 'spark', addresses: [at('10.0.0.7:9000', 'proven')] },
    { name: '<img src=x onerror=alert(1)>', state: 'other_key', reason: 'found, other key: `baton pair` both machines', addresses: [at('10.0.0.8:9000', 'other_key')] },
  ];
  await answerStreams(page, { discovery: { problem: null, found } });
  await page.goto(url);
  const list = page.locator('section[aria-labelledby=machines]');
  await expect(list).toContainText('spark (prefill) used');
  await expect(list).toContainText('<img src=x onerror=alert(1)> found, other key');
  await expect(list.locator('img')).toHaveCount(0);
  await expect(page.getByTitle('10.0.0.8:9000')).toBeVisible();
  await page.unroute('**/baton/state?stream=changes');
  await answerStreams(page, { discovery: { problem: 'mDNS does not work on this machine', found: [] } });
  await page.reload();
  await expect(list).toContainText('mDNS does not work on this machine');
  await expect(list).toContainText('No node announces itself.');
  expect(problems).toEqual([]);
});

test('a pair that cannot work says so on the card, in status and in the log, with what to do', async ({ page, problems, cluster }) => {
  // The second node runs another model; the first one only computes prompts, and is to generate.
  const machine = { name: 'machine', prefill_tps: 1e4, decode_tps: 1e3, decode_sharing_cost: 0, kv_bytes_per_token: 512, link_bytes_per_second: 1e9, link_round_trip_ms: 0 };
  const other = await cluster.node('--engine', 'sim', '--name', 'other', '--sim-machine', JSON.stringify(machine), '--role', 'prefill');
  const wrongRole = await cluster.node(...SIM, '--role', 'prefill');
  const { url } = await cluster.serve(...SIM, '--prefill', other.url, '--decode', wrongRole.url, '--no-calibration');
  await page.goto(url);
  const card = (name) => page.locator('.machine', { hasText: name });
  await expect(card('prefill-1').locator('.status')).toHaveText('Not used');
  await expect(card('prefill-1')).toContainText('it runs "other"');
  await expect(card('prefill-1').locator('.facts')).toContainText('other');
  await expect(card('decode-1').locator('.status')).toHaveText('Not used');
  await expect(card('decode-1')).toContainText('Name it with --prefill');
  await expect(page.locator('section[aria-labelledby=cluster] > .notice')).toHaveCount(2);
  expect(problems).toEqual([]);
});

test('a lost machine keeps its own model, and is not promised back if it was never used', async ({ page, problems, cluster }) => {
  const machine = { name: 'machine', prefill_tps: 1e4, decode_tps: 1e3, decode_sharing_cost: 0, kv_bytes_per_token: 512, link_bytes_per_second: 1e9, link_round_trip_ms: 0 };
  const other = await cluster.node('--engine', 'sim', '--name', 'other', '--sim-machine', JSON.stringify(machine), '--role', 'prefill');
  const { url } = await cluster.serve(...SIM, '--prefill', other.url, '--prefill', 'http://127.0.0.1:9', '--no-calibration');
  await page.goto(url);
  const card = (name) => page.locator('.machine', { hasText: name });
  await expect(card('prefill-1').locator('.status')).toHaveText('Not used');
  await other.kill();
  await expect(card('prefill-1').locator('.status')).toHaveText('Lost');
  await expect(card('prefill-1').locator('.facts')).toContainText('other');
  await expect(card('prefill-1')).toContainText('Not used: it runs another model');
  await expect(card('prefill-1').locator('.tag.simulated')).toHaveCount(1);
  await expect(page.locator('.notice.bad')).toHaveCount(0);
  // Nobody knows what runs where nothing has answered; its link is not drawn as lost.
  await expect(card('prefill-2').locator('.facts')).toContainText('not known yet');
  const link = (name) => page.locator('.link', { hasText: name });
  await expect(link('prefill-2')).toContainText('No handoffs: no answer yet from prefill-2');
  await expect(link('prefill-2')).toHaveClass('link');
  await expect(link('prefill-2').locator('.gone')).toHaveCount(0);
  // Of a lost link, the lost end is struck out.
  await expect(link('prefill-1')).toHaveClass('link lost');
  await expect(link('prefill-1').locator('.gone')).toHaveText('prefill-1');
  expect(problems).toEqual([]);
});

test('a machine with another cluster key is not used, and the page says what to do', async ({ page, problems, cluster }) => {
  const stranger = await cluster.nodeWith({ BATON_CLUSTER_KEY: 'the key of another cluster' }, ...SIM, '--role', 'prefill');
  const { url } = await cluster.serve(...SIM, '--prefill', stranger.url, '--no-calibration');
  await page.goto(url);
  const card = page.locator('.machine', { hasText: 'prefill-1' });
  await expect(card.locator('.status')).toHaveText('Not used');
  await expect(card).toContainText('BATON_CLUSTER_KEY');
  await expect(page.locator('.notice', { hasText: 'BATON_CLUSTER_KEY' })).toHaveCount(1);
  await expect(page.locator('.link')).toContainText('No handoffs: it has another cluster key');
  await expect(page.locator('.link .gone')).toHaveCount(0);
  expect(problems).toEqual([]);
});

test('a reply that moved says where', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM);
  await answerStreams(page, { routes: [request(1, { decode: 'decode-1', moved_to: 'decode-2', outcome: 'done' })] });
  await page.goto(url);
  const moved = page.locator('.request').first();
  await expect(moved.locator('.reason')).toHaveText('only route, moved to decode-2');
  await moved.getByRole('button').click();
  await expect(moved.locator('.details')).toContainText('decode-1 was lost after the first token, and decode-2 went on');
  expect(problems).toEqual([]);
});

test('a card of an own engine shows the options that are set, and a node that was started elsewhere none', async ({ page, problems, cluster }) => {
  const node = await cluster.node(...SIM);
  const { url } = await cluster.serve(...SIM, '--slots', '3', '--kv-codecs', 'none', '--decode', node.url);
  await page.goto(url);
  const card = (name) => page.locator('.machine', { hasText: name });
  const options = card('local').locator('.facts > div', { hasText: 'Options' }).locator('dd');
  await expect(options).toHaveText('engine = "sim", slots = 3, threads = 1, kv_codecs = ["none"]');
  await expect(card('decode-1')).toBeVisible();
  await expect(card('decode-1').locator('.facts')).not.toContainText('Options');
  expect(problems).toEqual([]);
});

test('the KV bar counts the cells that there are, and a fresh machine has all of them free', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM, '--slots', '3', '--ctx-size', '2048');
  await page.goto(url);
  const state = await (await fetch(`${url}/baton/state`)).json();
  const node = state.models[0].nodes[0];
  expect([node.kv_cells, node.free_kv_cells]).toEqual([3 * 2048, 3 * 2048]);
  await expect(page.locator('.machine .meter', { hasText: 'KV' })).toContainText('0 % of 6,144 tok');
  // Half as many as slots and contexts: they are shared.
  const shared = { ...node, kv_cells: 3072, free_kv_cells: 1536 };
  await page.unroute('**/baton/state?stream=changes');
  await answerStreams(page, { models: [{ ...state.models[0], nodes: [shared] }] });
  await page.reload();
  await expect(page.locator('.machine .meter', { hasText: 'KV' })).toContainText('50 % of 3,072 tok');
  expect(problems).toEqual([]);
});

test('a machine that never answered is not lost', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve(...SIM, '--prefill', 'http://127.0.0.1:9', '--no-calibration');
  await page.goto(url);
  const card = page.locator('.machine', { hasText: 'prefill-1' });
  await expect(card).toContainText('No answer yet');
  await expect.poll(async () => (await (await fetch(`${url}/baton/state`)).json()).models[0].nodes[1].life).toBe('down');
  await expect(card.locator('.status')).toHaveText('No answer yet');
  await expect(card).not.toContainText('Lost');
  await expect(page.locator('.notice.bad')).toHaveCount(0);
  expect(problems).toEqual([]);
});
