/** The models of the cluster: which machine has which files, and which of them are loaded. */

import { useState } from 'preact/hooks';
import { bytes, count, percent, plural } from './format';
import { memo } from './memo';
import { isMoving, sharedModels, useClusterModels } from './models';
import type { ClusterModels, MachineReport, Order, SharedModel, Transfer } from './models';
import type { Model } from './state';
import { WideTable } from './WideTable';
import { LOADS, TRANSFERS } from './words';

type Give = (order: Order) => Promise<boolean>;

function Progress({ transfer, machine, cancel }: { transfer: Transfer; machine: string; cancel: (() => void) | null }) {
  const { model, state, done_bytes, total_bytes, is_copy, problem } = transfer;
  const share = total_bytes ? Math.min(1, done_bytes / total_bytes) : null;
  const moves = isMoving(transfer);
  return (
    <div class="moving">
      <p>
        <strong>{TRANSFERS[state] ?? state}:</strong> <code>{model}</code> from {is_copy ? 'another machine' : 'the hub'}, <span class="num">{bytes(done_bytes)}</span>
        {total_bytes !== undefined && <span class="num"> of {bytes(total_bytes)}</span>}
        {share !== null && moves && <span class="num"> ({percent(share)})</span>}
        {problem && <span class="why lost"> {problem}</span>}
      </p>
      {moves && (
        <p class="actions">
          <progress aria-label={`${model} to ${machine}`} max={1} {...(share === null ? {} : { value: share })} />
          {cancel && <button type="button" class="quiet small-button" onClick={cancel}>Cancel</button>}
        </p>
      )}
    </div>
  );
}

function MachineRow({ report, give }: { report: MachineReport; give: Give | null }) {
  const { machine, folder, problem } = report;
  return (
    <li class="card">
      <h3>{machine}</h3>
      {folder ? (
        <p class="since">
          {plural(folder.models.length, 'model')}
          {folder.free_bytes !== undefined && <span class="num">, {bytes(folder.free_bytes)} free</span>}
        </p>
      ) : (
        <p class="why">{problem ?? 'It does not say which models it has.'}</p>
      )}
      {folder?.transfer && <Progress transfer={folder.transfer} machine={machine} cancel={give && (() => void give({ action: 'cancel', on: machine }))} />}
    </li>
  );
}

/** A deletion asks again. */
function Delete({ model, on, give }: { model: string; on: string; give: Give }) {
  const [isSure, setSure] = useState(false);
  if (!isSure) {
    return <button type="button" class="quiet small-button" aria-label={`Delete ${model} on ${on}…`} onClick={() => setSure(true)}>Delete…</button>;
  }
  return (
    <>
      <button type="button" class="stop small-button" onClick={() => void give({ action: 'delete', model, on }).then(() => setSure(false))}>Delete on {on}</button>
      <button type="button" class="quiet small-button" onClick={() => setSure(false)}>Keep it</button>
    </>
  );
}

function CopyTo({ model, others, give }: { model: SharedModel; others: string[]; give: Give }) {
  const [to, choose] = useState('');
  const chosen = others.includes(to) ? to : (others[0] ?? '');
  const from = model.on[0]?.machine ?? '';
  return (
    <span class="copy-to">
      <label>
        <span class="unseen">Copy {model.name} to</span>
        <select value={chosen} onChange={(event) => choose(event.currentTarget.value)}>
          {others.map((name) => <option key={name}>{name}</option>)}
        </select>
      </label>
      <button type="button" class="quiet small-button" onClick={() => void give({ action: 'copy', model: model.name, from, to: chosen })}>Copy there</button>
    </span>
  );
}

function ModelFiles({ model, machines, give }: { model: SharedModel; machines: string[]; give: Give | null }) {
  const has = new Set(model.on.map(({ machine }) => machine));
  const others = machines.filter((name) => !has.has(name));
  return (
    <tr>
      <th scope="row">
        <span class="file-name">{model.name}</span>
        <span class="said">
          {[model.quantization, plural(model.n_files, 'file'), model.sha256 && `sha256 ${model.sha256.slice(0, 12)}…`].filter(Boolean).join(' · ')}
        </span>
      </th>
      <td class="num">{bytes(model.n_bytes)}</td>
      <td>
        <ul class="places">
          {model.on.map(({ machine, fits, inUse }) => (
            <li key={machine}>
              <span class={fits ? 'tag' : 'tag too-large'}>
                {machine}
                {inUse ? ', in use' : ''}
                {fits ? '' : ', does not fit'}
              </span>
              {give && !inUse && <Delete model={model.name} on={machine} give={give} />}
            </li>
          ))}
        </ul>
        {give && others.length > 0 && <CopyTo model={model} others={others} give={give} />}
      </td>
    </tr>
  );
}

function Pull({ machines, give }: { machines: string[]; give: Give }) {
  const [model, type] = useState('');
  const [on, choose] = useState('');
  const chosen = machines.includes(on) ? on : (machines[0] ?? '');
  const submit = async (event: Event) => {
    event.preventDefault();
    if (await give({ action: 'pull', model: model.trim(), on: chosen })) type('');
  };
  return (
    <form class="actions pull" onSubmit={submit}>
      <label for="pull-model">Pull from the hub</label>
      <input id="pull-model" value={model} placeholder="smollm2, or owner/repo:Q4_K_M" onInput={(event) => type(event.currentTarget.value)} />
      <label for="pull-on">to</label>
      <select id="pull-on" value={chosen} onChange={(event) => choose(event.currentTarget.value)}>
        {machines.map((name) => <option key={name}>{name}</option>)}
      </select>
      <button type="submit" disabled={!model.trim() || !chosen}>Pull</button>
    </form>
  );
}

/** Models of `[[models]]`, which are loaded when somebody needs them. */
function Loads({ models, setLoaded }: { models: Model[]; setLoaded: ((model: string, keepAlive: number | null) => void) | null }) {
  const onDemand = models.filter((model) => model.residency);
  if (onDemand.length === 0) return null;
  return (
    <>
      <h3 class="sub">Loaded on demand</h3>
      <ul class="models">
        {onDemand.map(({ name, residency }) => (
          <li class="modelrow" key={name}>
            <strong>{name}</strong>
            <span>
              {LOADS[residency!.life] ?? residency!.life}, {bytes(residency!.measured_bytes || residency!.bytes)}
              {residency!.active > 0 && `, used by ${plural(residency!.active, 'request')}`}
              {residency!.waiting > 0 && `, ${count(residency!.waiting)} waiting`}
              {residency!.life === 'loaded' && residency!.expires_at_ms === undefined && ', stays'}
              {residency!.last_failure && `; ${residency!.last_failure}`}
            </span>
            {setLoaded && (
              <span class="actions">
                {residency!.life !== 'loaded' && <button type="button" class="quiet small-button" aria-label={`Load ${name}`} onClick={() => setLoaded(name, null)}>Load</button>}
                <button type="button" class="quiet small-button" aria-label={`Pin ${name}`} onClick={() => setLoaded(name, -1)}>Pin</button>
                {residency!.life === 'loaded' && <button type="button" class="quiet small-button" aria-label={`Unload ${name}`} onClick={() => setLoaded(name, 0)}>Unload</button>}
              </span>
            )}
          </li>
        ))}
      </ul>
    </>
  );
}

function Files({ listed, give }: { listed: ClusterModels; give: Give | null }) {
  const machines = listed.machines.filter(({ folder }) => folder).map(({ machine }) => machine);
  const shared = sharedModels(listed.machines);
  return (
    <>
      <ul class="cards">
        {listed.machines.map((report) => <MachineRow key={report.machine} report={report} give={give} />)}
      </ul>
      {give && machines.length > 0 && <Pull machines={machines} give={give} />}
      {shared.length === 0 ? (
        <p class="empty">No machine has a model in its models folder. A file that <code>--model</code> names elsewhere is not listed.</p>
      ) : (
        <WideTable label="Model files by machine" kind="files" columns={['Model', 'Size', 'Machines that have it']}>
          {shared.map((model) => <ModelFiles key={`${model.name} ${model.n_bytes}`} model={model} machines={machines} give={give} />)}
        </WideTable>
      )}
    </>
  );
}

export const Models = memo(({ models, isShown }: { models: Model[]; isShown: boolean }) => {
  const { models: listed, problem, order, setLoaded } = useClusterModels(isShown);
  const mayChange = listed?.may_change ?? false;
  return (
    <section class="panel" aria-labelledby="models">
      <h2 id="models">
        Models <small>which machine has which files</small>
      </h2>
      {problem !== null && <p class="notice bad" role="alert">{problem}</p>}
      {listed && !mayChange && (
        <p class="notice">
          Only shown here: the endpoint's configuration does not let operators change models (<code>allow_model_management = true</code>).
        </p>
      )}
      {listed ? <Files listed={listed} give={mayChange ? order : null} /> : problem === null && <p class="empty">Each machine is asked for its models…</p>}
      <Loads models={models} setLoaded={mayChange ? setLoaded : null} />
    </section>
  );
});
