/** A block of code, highlighted, with a button that copies it. */

import { createLowlight } from 'lowlight';
import bash from 'highlight.js/lib/languages/bash';
import c from 'highlight.js/lib/languages/c';
import cpp from 'highlight.js/lib/languages/cpp';
import css from 'highlight.js/lib/languages/css';
import diff from 'highlight.js/lib/languages/diff';
import dockerfile from 'highlight.js/lib/languages/dockerfile';
import go from 'highlight.js/lib/languages/go';
import ini from 'highlight.js/lib/languages/ini';
import java from 'highlight.js/lib/languages/java';
import javascript from 'highlight.js/lib/languages/javascript';
import json from 'highlight.js/lib/languages/json';
import python from 'highlight.js/lib/languages/python';
import rust from 'highlight.js/lib/languages/rust';
import sql from 'highlight.js/lib/languages/sql';
import swift from 'highlight.js/lib/languages/swift';
import typescript from 'highlight.js/lib/languages/typescript';
import xml from 'highlight.js/lib/languages/xml';
import yaml from 'highlight.js/lib/languages/yaml';
import { h } from 'preact';
import type { ComponentChild } from 'preact';
import { useState } from 'preact/hooks';
import { memo } from '../memo';
import { copy } from './clipboard';

const lowlight = createLowlight({ bash, c, cpp, css, diff, dockerfile, go, ini, java, javascript, json, python, rust, sql, swift, typescript, xml, yaml });

/** Longer code is shown without colours: highlighting must not hold up the page. */
const MAX_HIGHLIGHTED = 20_000;

/** The part of a syntax tree that is drawn. */
interface Piece {
  type: string;
  value?: string;
  properties?: { className?: string[] | undefined };
  children?: Piece[];
}

function drawn(piece: Piece): ComponentChild {
  if (piece.type === 'text') return piece.value ?? '';
  return h('span', { class: (piece.properties?.className ?? []).join(' ') }, (piece.children ?? []).map(drawn));
}

function highlighted(text: string, language: string): ComponentChild[] {
  if (!lowlight.registered(language) || text.length > MAX_HIGHLIGHTED) return [text];
  return (lowlight.highlight(language, text).children as Piece[]).map(drawn);
}

interface CopyProps {
  text: string;
  /** What is copied, for those who hear the page; all see its first word if `isNamed`. */
  what: string;
  isNamed?: boolean;
}

export function Copy({ text, what, isNamed }: CopyProps) {
  const [said, say] = useState('Copy');
  const act = async () => {
    say((await copy(text)) ? 'Copied' : 'Not copied');
    setTimeout(() => say('Copy'), 2_000);
  };
  return (
    <button type="button" class="quiet small-button" aria-label={`${said} ${what}`} onClick={act}>{isNamed ? `${said} ${what.split(' ')[0]}` : said}</button>
  );
}

interface CodeProps {
  text: string;
  language: string;
  /** It is not coloured before it is complete: that would begin anew with each token. */
  isComplete: boolean;
}

export const Code = memo(({ text, language, isComplete }: CodeProps) => (
  <div class="code">
    <p class="code-head">
      <span>{language}</span>
      <Copy text={text} what="the code" />
    </p>
    <pre tabIndex={0}>
      <code>{isComplete ? highlighted(text, language.toLowerCase()) : text}</code>
    </pre>
  </div>
));
