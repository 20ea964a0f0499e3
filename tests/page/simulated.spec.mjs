// Figures of simulated machines say so, on every view.
import { chat } from './cluster.mjs';
import { answerStreams, expect, row, test } from './browser.mjs';

const MACHINE = JSON.stringify({
  name: 'M3 Ultra', prefill_tps: 1470, decode_tps: 38, decode_sharing_cost: 0.06, kv_bytes_per_token: 131072,
  link_bytes_per_second: 1.25e9, link_round_trip_ms: 0.3,
});

test('simulated machines are marked, and so are their requests', async ({ page, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim', '--sim-machine', MACHINE);
  await chat(url, 'hi', { model: 'sim' });
  await page.goto(url);
  const machine = page.locator('.machine', { hasText: 'local' });
  await expect(machine.locator('.tag.simulated')).toHaveText('simulated');
  await expect(machine).toContainText('M3 Ultra, simulated');
  await expect(machine).toContainText('the endpoint’s own machine');
  await expect(row(page, 'Done').locator('.tag.simulated')).toHaveText('simulated');
  const notice = page.locator('.notice.simulated');
  for (const view of ['Overview', 'Plan', 'Models', 'Operate', 'Try it']) {
    await page.getByRole('navigation').getByRole('link', { name: view }).click();
    await expect(notice).toContainText('all machines are simulated');
  }
  // A real machine beside it has real figures.
  const state = await (await fetch(`${url}/baton/state`)).json();
  const [model] = state.models;
  const real = { ...model.nodes[0], name: 'decode-1', engine: 'llama', devices: ['CPU'], simulated: false, own: false };
  await answerStreams(page, { ...state, history: [], models: [{ ...model, nodes: [...model.nodes, real] }] });
  await page.goto(`${url}/#overview`);
  await page.reload();
  await expect(notice).toContainText('local is simulated');
  await expect(page.locator('.machine', { hasText: 'decode-1' }).locator('.tag.simulated')).toHaveCount(0);
  expect(problems).toEqual([]);
});
