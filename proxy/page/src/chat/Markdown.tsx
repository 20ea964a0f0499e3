/** A reply's Markdown, drawn from its tokens: no text of a model ever becomes HTML. */

import { marked } from 'marked';
import type { Token, Tokens } from 'marked';
import type { ComponentChild } from 'preact';
import { useMemo } from 'preact/hooks';
import { memo } from '../memo';
import { Code } from './Code';

const ENTITIES: Record<string, string> = { '&amp;': '&', '&lt;': '<', '&gt;': '>', '&quot;': '"', '&#39;': "'", '&nbsp;': '\u00a0' };

function unescaped(text: string): string {
  return text.replace(/&(?:amp|lt|gt|quot|#39|nbsp);/g, (entity) => ENTITIES[entity] ?? entity);
}

/** Other addresses, such as `javascript:`, are shown as text. */
function isLink(href: string): boolean {
  return /^(https?:|mailto:)/i.test(href);
}

function linked(href: string, words: ComponentChild): ComponentChild {
  if (!isLink(href)) return <>{words} ({href})</>;
  return (
    <a href={href} target="_blank" rel="noopener noreferrer">{words}</a>
  );
}

function inline(tokens: Token[] | undefined): ComponentChild[] {
  return (tokens ?? []).map((token, i) => <Inline key={i} token={token as Tokens.Generic} />);
}

function Inline({ token }: { token: Tokens.Generic }) {
  switch (token.type) {
    case 'strong':
      return <strong>{inline(token.tokens)}</strong>;
    case 'em':
      return <em>{inline(token.tokens)}</em>;
    case 'del':
      return <del>{inline(token.tokens)}</del>;
    case 'codespan':
      return <code>{token.text}</code>;
    case 'br':
      return <br />;
    case 'link':
      return <>{linked(token.href, inline(token.tokens))}</>;
    // A picture of another server would tell it who reads this, so it is not loaded.
    case 'image':
      return <>{linked(token.href, `picture: ${token.text || token.href}`)}</>;
    case 'text':
      return token.tokens ? <>{inline(token.tokens)}</> : <>{unescaped(token.text)}</>;
    case 'escape':
      return <>{token.text}</>;
    default:
      return <>{token.raw}</>;
  }
}

const Block = memo(({ token, isLast }: { token: Tokens.Generic; isLast: boolean }) => <>{block(token, isLast)}</>);

function blocks(tokens: Token[] | undefined, isOpen: boolean): ComponentChild[] {
  const all = tokens ?? [];
  return all.map((token, i) => <Block key={i} token={token as Tokens.Generic} isLast={isOpen && i === all.length - 1} />);
}

function heading(token: Tokens.Generic): ComponentChild {
  // The page's own headings are above: a reply begins at the fourth level.
  return token.depth <= 2 ? <h4>{inline(token.tokens)}</h4> : <h5>{inline(token.tokens)}</h5>;
}

function table({ header, rows, align }: Tokens.Table): ComponentChild {
  const style = (i: number) => (align[i] === 'right' ? 'num end' : '');
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Table of the reply">
      <table>
        <thead>
          <tr>{header.map((cell, i) => <th key={i} scope="col" class={style(i)}>{inline(cell.tokens)}</th>)}</tr>
        </thead>
        <tbody>
          {rows.map((row, n) => <tr key={n}>{row.map((cell, i) => <td key={i} class={style(i)}>{inline(cell.tokens)}</td>)}</tr>)}
        </tbody>
      </table>
    </div>
  );
}

function list({ ordered, start, items }: Tokens.List, isOpen: boolean): ComponentChild {
  const drawn = items.map((item, i) => (
    <li key={i}>
      {item.task && <span aria-label={item.checked ? 'done' : 'not done'} role="img">{item.checked ? '☑ ' : '☐ '}</span>}
      {blocks(item.tokens.filter(({ type }) => (type as string) !== 'checkbox'), isOpen && i === items.length - 1)}
    </li>
  ));
  return ordered ? <ol start={Number(start) || 1}>{drawn}</ol> : <ul>{drawn}</ul>;
}

/** `isLast`: the block is the last one of a reply that has not ended, so it still grows. */
function block(token: Tokens.Generic, isLast: boolean): ComponentChild {
  switch (token.type) {
    case 'heading':
      return heading(token);
    case 'paragraph':
      return <p>{inline(token.tokens)}</p>;
    case 'code':
      return <Code text={token.text} language={(token.lang ?? '').split(/\s/)[0] ?? ''} isComplete={!isLast} />;
    case 'blockquote':
      return <blockquote>{blocks(token.tokens, isLast)}</blockquote>;
    case 'list':
      return list(token as Tokens.List, isLast);
    case 'table':
      return table(token as Tokens.Table);
    case 'hr':
      return <hr />;
    case 'space':
    case 'def':
      return null;
    case 'text':
      return <Inline token={token} />;
    default:
      return <p>{token.raw}</p>;
  }
}

/** Blocks that have not changed keep their objects, so only the last one is drawn again while a reply grows. */
function useTokens(text: string): Token[] {
  const known = useMemo(() => new Map<string, Token>(), []);
  return useMemo(() => {
    const tokens = marked.lexer(text, { gfm: true, breaks: true });
    const kept = tokens.map((token, i) => known.get(`${i} ${token.raw}`) ?? token);
    known.clear();
    kept.forEach((token, i) => known.set(`${i} ${token.raw}`, token));
    return kept;
  }, [text]);
}

export function Markdown({ text, isOpen }: { text: string; isOpen: boolean }) {
  return <div class="text markdown">{blocks(useTokens(text), isOpen)}</div>;
}
