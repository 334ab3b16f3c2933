// Records what a product's own client sends to PostgreSQL and makes scripts for qbench of it, so that exactly those statements are measured, of whatever version is
// installed. Runs from the folder of the installed packages (harness/contender.py copies it there).
import { writeFileSync } from 'node:fs';
import pg from 'pg';
import utils from 'pg/lib/utils.js';

export const MARK = 'the payload of the task';
export const connection = { host: process.env.PGHOST, port: +process.env.PGPORT, user: process.env.PGUSER, database: process.env.PGDATABASE };
const sent = [];

const query = pg.Client.prototype.query;
pg.Client.prototype.query = function (config, values, ...rest) {
  const text = typeof config === 'string' ? config : config.text;
  if (text) sent.push({ text, values: config.values ?? (Array.isArray(values) ? values : []), prepared: Boolean(config.name) });
  return query.call(this, config, values, ...rest);
};

const literal = value => {
  if (value === null || value === undefined) return 'null';
  return pg.Client.prototype.escapeLiteral(String(utils.prepareValue(value)));
};

// The last statement sent that matches, with its values written into it: by `written` where that gives an expression, else as literals.
export const statement = (pattern, written = () => undefined) => {
  const found = sent.findLast(({ text }) => pattern.test(text));
  if (!found) throw new Error(`nothing sent matches ${pattern}; sent was:\n${sent.map(({ text }) => text.slice(0, 200)).join('\n---\n')}`);
  const text = found.text.replace(/--.*$/gm, '').replace(/\s+/g, ' ').trim().replace(/;$/, '');
  return text.replace(/\$(\d+)/g, (_, number) => {
    const value = found.values[number - 1];
    const expression = written(value);
    return expression === undefined ? literal(value) : `(${expression})`;
  });
};

// Text in which the marker, as a string in JSON, gives way to an expression of SQL when the statement runs.
export const withPayload = (text, expression) => `replace(${literal(text)}, ${literal(JSON.stringify(MARK))}, ${expression}::text)`;

export const write = (name, lines) => writeFileSync(`${process.env.RECORDED}/${name}`, lines.join('\n') + '\n');
