/*
 * qbench: runs queue scripts from many clients and prints what they took, as one JSON object.
 *
 * The scripts are a subset of pgbench's, so that the same file runs there, too. pgbench alone will not do: it has no percentiles per statement, ends a
 * client whose \gset meets no row (an empty poll), makes no array of many rows, and cannot wait for a notification.
 *
 *   qbench [-x] -d CONNINFO [-p CONNINFO] -T SECONDS [-n TASKS] [-b BACKLOG] [-i MILLISECONDS] ROLE…
 *     -p  where roles with pooled=1 connect
 *     -x  parse and plan at every execution (pgbench's -M extended); else every statement is prepared once per client
 *     -n  end when so many tasks were consumed
 *     -b  tasks that are in the queue already, for roles with feed
 *     -i  print what happened in each interval of this length, too
 *   ROLE = NAME:FILE:CLIENTS[:OPTION,…]; a name that begins with "prod" produces tasks, every other consumes them. FILE "-" with listen only listens.
 *     rate=R       so many iterations a second for the whole role, started on a schedule
 *     listen=C     after an empty poll wait for a notification on channel C, at most as long as poll says
 *     poll=MS      pause after an empty poll
 *     per=N        tasks of an iteration where no \gset says it
 *     feed=K       iterate only while fewer than K tasks are in the queue
 *     drain=1      end at the first empty poll
 *     lat=COLUMN   this column holds the payload: the time since it was made is the latency from enqueue to claim
 *     init=FILE    a script that each client runs once before the clock starts
 *     pooled=1     connect by -p, and do as with -x: a pooler in transaction mode keeps no prepared statements
 *
 * Scripts: "--" comments; a statement ends with ";" at the end of a line or with \gset; "\set name random(a, b)" or "\set name integer"; "\json name column,…"
 * makes of variables that hold arrays the text of a JSON array of objects, as a client does that sends JSON; :name, and built in :client_id and :payload (about 300
 * bytes of JSON with the time it was made). \gset keeps one row in variables named after its columns, several rows in variables that hold arrays; no row, or a
 * null in the first column, is an empty poll and ends the iteration.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <libpq-fe.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_STATEMENTS 16
#define MAX_PARAMETERS 32
#define MAX_VARIABLES 64
#define PAD 265

typedef struct {
	char *sql; /* NULL: sets `variable`, to JSON of the variables in `parameter` if there are any */
	int parameters;
	char *parameter[MAX_PARAMETERS];
	int keeps; /* ended with \gset */
	char *variable;
	long low, high;
} Statement;

typedef struct {
	int count;
	Statement statement[MAX_STATEMENTS];
} Script;

typedef struct {
	char *name, *listen, *column;
	Script script, init;
	int clients, poll_ms, drain, pooled, produces;
	double rate;
	long per, feed;
} Role;

typedef struct {
	uint32_t *value;
	size_t count, capacity;
	double sum;
} Series;

typedef struct {
	int count;
	char *name[MAX_VARIABLES], *value[MAX_VARIABLES];
} Variables;

typedef struct {
	Role *role;
	int id, index;
	pthread_t thread;
	PGconn *connection;
	Variables variables;
	unsigned seed;
	/* Microseconds, but for `ended` (milliseconds since the start) and `taken` (tasks), which go with `iteration` and `first`. */
	Series statement[MAX_STATEMENTS], iteration, first, ended, taken, empty, waited;
	long iterations, tasks, empties, errors;
	char error[256];
} Client;

static const char *conninfo = "", *pooler = "";
static int unnamed = 0;
static double seconds = 5, start;
static long most_tasks = 0, interval_ms = 0;
static atomic_int stop;
static atomic_long consumed, produced;
static char pad[PAD + 1];

static void die(const char *format, ...) {
	va_list arguments;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(1);
}

static void *allocate(size_t size) {
	void *memory = calloc(1, size);
	if (!memory) die("out of memory");
	return memory;
}

static char *copy(const char *text) {
	char *memory = strdup(text);
	if (!memory) die("out of memory");
	return memory;
}

static double clock_of(clockid_t which) {
	struct timespec at;
	clock_gettime(which, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static double now(void) { return clock_of(CLOCK_MONOTONIC); }

static void sleep_for(double duration) {
	if (duration <= 0) return;
	struct timespec left = {(time_t)duration, (long)((duration - (double)(time_t)duration) * 1e9)};
	nanosleep(&left, NULL);
}

static void push(Series *series, double value) {
	if (series->count == series->capacity) {
		series->capacity = series->capacity ? series->capacity * 2 : 4096;
		series->value = realloc(series->value, series->capacity * sizeof *series->value);
		if (!series->value) die("out of memory");
	}
	series->value[series->count++] = value > 4e9 ? 4000000000u : (uint32_t)value;
	series->sum += value;
}

/* Scripts */

static char *contents(const char *path) {
	FILE *file = fopen(path, "r");
	if (!file) die("%s: cannot be read", path);
	fseek(file, 0, SEEK_END);
	long size = ftell(file);
	rewind(file);
	char *text = allocate((size_t)size + 1);
	if (fread(text, 1, (size_t)size, file) != (size_t)size) die("%s: cannot be read", path);
	fclose(file);
	return text;
}

static Statement *add_statement(Script *script) {
	if (script->count == MAX_STATEMENTS) die("more than %d statements in a script", MAX_STATEMENTS);
	return &script->statement[script->count++];
}

static int parameter_number(Statement *statement, const char *name) {
	for (int i = 0; i < statement->parameters; i++)
		if (!strcmp(statement->parameter[i], name)) return i + 1;
	if (statement->parameters == MAX_PARAMETERS) die("more than %d variables in a statement", MAX_PARAMETERS);
	statement->parameter[statement->parameters++] = copy(name);
	return statement->parameters;
}

/* :name becomes $n, but not in quotes and not in a cast. */
static void add_sql(Script *script, const char *text, int keeps) {
	while (isspace((unsigned char)*text)) text++;
	size_t length = strlen(text);
	while (length && isspace((unsigned char)text[length - 1])) length--;
	if (!length) return;
	Statement *statement = add_statement(script);
	statement->keeps = keeps;
	statement->sql = allocate(length * 2 + 64);
	char *out = statement->sql;
	int quoted = 0;
	for (size_t i = 0; i < length;) {
		char c = text[i];
		if (c == '\'') quoted = !quoted;
		if (!quoted && c == ':' && text[i + 1] == ':') {
			*out++ = ':';
			*out++ = ':';
			i += 2;
		} else if (!quoted && c == ':' && (isalpha((unsigned char)text[i + 1]) || text[i + 1] == '_')) {
			char name[64] = "";
			size_t n = 0;
			for (i++; i < length && (isalnum((unsigned char)text[i]) || text[i] == '_'); i++)
				if (n < sizeof name - 1) name[n++] = text[i];
			out += sprintf(out, "$%d", parameter_number(statement, name));
		} else {
			*out++ = c;
			i++;
		}
	}
}

static void add_set(Script *script, const char *line) {
	char name[64], value[200];
	if (sscanf(line, "%63s %199[^\n]", name, value) != 2) die("\\set %s: neither an integer nor random(a, b)", line);
	Statement *statement = add_statement(script);
	statement->variable = copy(name);
	if (sscanf(value, "random(%ld , %ld)", &statement->low, &statement->high) != 2) statement->low = statement->high = atol(value);
}

static void add_json(Script *script, const char *line) {
	char *text = copy(line), *rest;
	Statement *statement = add_statement(script);
	statement->variable = copy(strtok_r(text, " ,", &rest));
	for (char *name = strtok_r(NULL, " ,", &rest); name; name = strtok_r(NULL, " ,", &rest)) parameter_number(statement, name);
	if (!statement->parameters) die("\\json %s: of which columns?", line);
	free(text);
}

static void parse(Script *script, const char *path) {
	char *text = contents(path), *buffer = allocate(strlen(text) + 2), *rest;
	size_t length = 0;
	for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		while (isspace((unsigned char)*line)) line++;
		if (!strncmp(line, "--", 2)) continue;
		if (!strncmp(line, "\\set ", 5)) {
			add_set(script, line + 5);
			continue;
		}
		if (!strncmp(line, "\\json ", 6)) {
			add_json(script, line + 6);
			continue;
		}
		char *keep = strstr(line, "\\gset");
		size_t part = keep ? (size_t)(keep - line) : strlen(line);
		memcpy(buffer + length, line, part);
		length += part;
		buffer[length++] = '\n';
		size_t end = length;
		while (end && isspace((unsigned char)buffer[end - 1])) end--;
		int closed = end && buffer[end - 1] == ';';
		if (!keep && !closed) continue;
		buffer[closed ? end - 1 : length] = 0;
		add_sql(script, buffer, keep != NULL);
		length = 0;
	}
	buffer[length] = 0;
	add_sql(script, buffer, 0);
	free(buffer);
	free(text);
	if (!script->count) die("%s: an empty script", path);
}

/* Variables */

static void set_variable(Variables *variables, const char *name, char *value) {
	for (int i = 0; i < variables->count; i++)
		if (!strcmp(variables->name[i], name)) {
			free(variables->value[i]);
			variables->value[i] = value;
			return;
		}
	if (variables->count == MAX_VARIABLES) die("more than %d variables", MAX_VARIABLES);
	variables->name[variables->count] = copy(name);
	variables->value[variables->count++] = value;
}

static const char *variable(const Variables *variables, const char *name) {
	for (int i = 0; i < variables->count; i++)
		if (!strcmp(variables->name[i], name)) return variables->value[i];
	die("the variable :%s is not set", name);
	return NULL;
}

/* The time in a payload: JSON, or bytea in hexadecimal that holds it. */
static double made_at(const char *value) {
	char decoded[128];
	if (!strncmp(value, "\\x", 2)) {
		size_t n = 0;
		unsigned byte;
		for (const char *p = value + 2; n < sizeof decoded - 1 && sscanf(p, "%2x", &byte) == 1; p += 2) decoded[n++] = (char)byte;
		decoded[n] = 0;
		value = decoded;
	}
	const char *at = strstr(value, "\"t\":");
	return at ? atof(at + 4) : 0;
}

/* One column of all rows as the text of an array. Values are ids and names of ours: nothing in them needs quotes. */
static char *array_of(const PGresult *result, int column) {
	int rows = PQntuples(result);
	size_t size = 3;
	for (int row = 0; row < rows; row++) size += (size_t)PQgetlength(result, row, column) + 1;
	char *text = allocate(size), *out = text;
	*out++ = '{';
	for (int row = 0; row < rows; row++) {
		if (row) *out++ = ',';
		size_t length = (size_t)PQgetlength(result, row, column);
		memcpy(out, PQgetvalue(result, row, column), length);
		out += length;
	}
	*out = '}';
	return text;
}

/* The reverse: objects with these variables, which hold arrays of ids, as columns. */
static char *json_of(const Variables *variables, const Statement *statement) {
	const char *at[MAX_PARAMETERS];
	size_t size = 3;
	for (int k = 0; k < statement->parameters; k++) {
		at[k] = variable(variables, statement->parameter[k]) + 1;
		size_t names = strlen(statement->parameter[k]) + 16;
		size += strlen(at[k]) + names;
		for (const char *c = at[k]; *c; c++) size += *c == ',' ? names : 0;
	}
	char *text = allocate(size), *out = text;
	*out++ = '[';
	while (*at[0] && *at[0] != '}') {
		if (out[-1] != '[') *out++ = ',';
		for (int k = 0; k < statement->parameters; k++) {
			size_t length = strcspn(at[k], ",}");
			out += sprintf(out, "%s\"%s\":\"%.*s\"", k ? "," : "{", statement->parameter[k], (int)length, at[k]);
			at[k] += length + (at[k][length] == ',');
		}
		*out++ = '}';
	}
	*out = ']';
	return text;
}

static int used_in(const Script *script, const char *name) {
	for (int i = 0; i < script->count; i++)
		for (int k = 0; k < script->statement[i].parameters; k++)
			if (!strcmp(script->statement[i].parameter[k], name)) return 1;
	return 0;
}

static void keep_rows(Client *client, const PGresult *result, int as_array) {
	Role *role = client->role;
	int rows = PQntuples(result);
	for (int column = 0; column < PQnfields(result); column++) {
		const char *name = PQfname(result, column);
		if (role->column && !strcmp(name, role->column))
			for (int row = 0; row < rows; row++) {
				double made = made_at(PQgetvalue(result, row, column));
				if (made > 0) push(&client->waited, (clock_of(CLOCK_REALTIME) - made) * 1e6);
			}
		/* Not the payload, which is read but not wanted again. */
		if (!used_in(&role->script, name)) continue;
		set_variable(&client->variables, name, as_array ? array_of(result, column) : copy(PQgetvalue(result, 0, column)));
	}
}

/* Clients */

static void command(PGconn *connection, const char *sql) {
	PGresult *result = PQexec(connection, sql);
	if (PQresultStatus(result) != PGRES_COMMAND_OK) die("%s: %s", sql, PQerrorMessage(connection));
	PQclear(result);
}

static int prepares(const Role *role) { return !unnamed && !role->pooled; }

static void open_connection(Client *client) {
	Role *role = client->role;
	client->connection = PQconnectdb(role->pooled ? pooler : conninfo);
	if (PQstatus(client->connection) != CONNECTION_OK) die("%s", PQerrorMessage(client->connection));
	for (int i = 0; prepares(role) && i < role->script.count; i++) {
		if (!role->script.statement[i].sql) continue;
		char name[16];
		snprintf(name, sizeof name, "s%d", i);
		PGresult *result = PQprepare(client->connection, name, role->script.statement[i].sql, 0, NULL);
		if (PQresultStatus(result) != PGRES_COMMAND_OK) die("%s: %s", role->script.statement[i].sql, PQerrorMessage(client->connection));
		PQclear(result);
	}
	if (role->listen) {
		char sql[200];
		snprintf(sql, sizeof sql, "LISTEN \"%s\"", role->listen);
		command(client->connection, sql);
	}
}

static PGresult *execute(Client *client, const Statement *statement, int number, int by_name) {
	const char *values[MAX_PARAMETERS];
	for (int k = 0; k < statement->parameters; k++) values[k] = variable(&client->variables, statement->parameter[k]);
	if (!by_name) return PQexecParams(client->connection, statement->sql, statement->parameters, NULL, values, NULL, NULL, 0);
	char name[16];
	snprintf(name, sizeof name, "s%d", number);
	return PQexecPrepared(client->connection, name, statement->parameters, values, NULL, NULL, 0);
}

static int succeeded(const PGresult *result) { return PQresultStatus(result) == PGRES_TUPLES_OK || PQresultStatus(result) == PGRES_COMMAND_OK; }

static void new_payload(Client *client) {
	char *payload = allocate(PAD + 64);
	snprintf(payload, PAD + 64, "{\"t\":%.6f,\"pad\":\"%s\"}", clock_of(CLOCK_REALTIME), pad);
	set_variable(&client->variables, "payload", payload);
}

static void run_init(Client *client) {
	Script *script = &client->role->init;
	new_payload(client);
	for (int i = 0; i < script->count; i++) {
		if (!script->statement[i].sql) continue;
		PGresult *result = execute(client, &script->statement[i], i, 0);
		if (!succeeded(result)) die("%s: %s", script->statement[i].sql, PQerrorMessage(client->connection));
		if (script->statement[i].keeps && PQntuples(result)) keep_rows(client, result, 0);
		PQclear(result);
	}
}

static int take_notifications(PGconn *connection) {
	int count = 0;
	PQconsumeInput(connection);
	for (PGnotify *notification; (notification = PQnotifies(connection)); count++) PQfreemem(notification);
	return count;
}

static void wait_readable(PGconn *connection, double milliseconds) {
	struct pollfd descriptor = {PQsocket(connection), POLLIN, 0};
	if (milliseconds >= 1) poll(&descriptor, 1, (int)milliseconds);
}

static void pause_after_empty(Client *client) {
	Role *role = client->role;
	double left = (start + seconds - now()) * 1000;
	if (role->listen) {
		if (take_notifications(client->connection)) return;
		double most = role->poll_ms > 0 ? role->poll_ms : 1000;
		wait_readable(client->connection, most < left ? most : left);
		take_notifications(client->connection);
	} else if (role->poll_ms > 0) {
		sleep_for((role->poll_ms < left ? role->poll_ms : left) / 1000);
	}
}

enum outcome { DONE, EMPTY, FAILED };

static enum outcome iterate(Client *client, long *tasks, double *first) {
	Role *role = client->role;
	*tasks = role->per;
	*first = 0;
	new_payload(client);
	for (int i = 0; i < role->script.count; i++) {
		Statement *statement = &role->script.statement[i];
		if (!statement->sql && statement->parameters) {
			set_variable(&client->variables, statement->variable, json_of(&client->variables, statement));
			continue;
		}
		if (!statement->sql) {
			double share = (double)rand_r(&client->seed) / ((double)RAND_MAX + 1);
			char value[32];
			snprintf(value, sizeof value, "%ld", statement->low + (long)(share * (double)(statement->high - statement->low + 1)));
			set_variable(&client->variables, statement->variable, copy(value));
			continue;
		}
		double began = now();
		PGresult *result = execute(client, statement, i, prepares(role));
		double took = (now() - began) * 1e6;
		if (!succeeded(result)) {
			client->errors++;
			snprintf(client->error, sizeof client->error, "%s", PQerrorMessage(client->connection));
			PQclear(result);
			if (PQstatus(client->connection) != CONNECTION_OK) atomic_store(&stop, 1);
			return FAILED;
		}
		if (statement->keeps && (!PQntuples(result) || PQgetisnull(result, 0, 0))) {
			push(&client->empty, took);
			PQclear(result);
			return EMPTY;
		}
		push(&client->statement[i], took);
		if (!*first) *first = took;
		if (statement->keeps) {
			keep_rows(client, result, PQntuples(result) > 1 || role->per > 1);
			if (!role->produces) *tasks = PQntuples(result);
		}
		PQclear(result);
	}
	return DONE;
}

static int over(void) {
	return atomic_load(&stop) || now() >= start + seconds || (most_tasks && atomic_load(&consumed) >= most_tasks);
}

static void only_listen(Client *client) {
	while (now() < start + seconds) {
		wait_readable(client->connection, 50);
		client->iterations += take_notifications(client->connection);
	}
}

static void work(Client *client) {
	Role *role = client->role;
	double step = role->rate > 0 ? role->clients / role->rate : 0;
	double due = start + (role->rate > 0 ? client->index / role->rate : 0);
	while (!over()) {
		if (role->feed && atomic_load(&produced) - atomic_load(&consumed) >= role->feed) {
			sleep_for(0.001);
			continue;
		}
		if (step > 0) {
			if (due > start + seconds) break;
			sleep_for(due - now());
			due += step;
		}
		long tasks;
		double first, began = now();
		switch (iterate(client, &tasks, &first)) {
			case EMPTY:
				client->empties++;
				if (role->drain) return;
				pause_after_empty(client);
				break;
			case FAILED:
				sleep_for(0.001);
				break;
			case DONE:
				client->iterations++;
				client->tasks += tasks;
				push(&client->iteration, (now() - began) * 1e6);
				push(&client->first, first);
				push(&client->ended, (now() - start) * 1e3);
				push(&client->taken, (double)tasks);
				atomic_fetch_add(role->produces ? &produced : &consumed, tasks);
		}
	}
}

static pthread_barrier_t ready;

static void *run(void *argument) {
	Client *client = argument;
	char id[16];
	snprintf(id, sizeof id, "%d", client->id);
	set_variable(&client->variables, "client_id", copy(id));
	client->seed = (unsigned)client->id * 7919u + 13u + (unsigned)time(NULL);
	open_connection(client);
	run_init(client);
	pthread_barrier_wait(&ready); /* all are connected */
	pthread_barrier_wait(&ready); /* and the clock has started */
	if (client->role->script.count) work(client);
	else only_listen(client);
	PQfinish(client->connection);
	return NULL;
}

/* What is printed */

static int ascending(const void *left, const void *right) {
	uint32_t x = *(const uint32_t *)left, y = *(const uint32_t *)right;
	return x < y ? -1 : x > y;
}

static void print_percentiles(Series *all) {
	qsort(all->value, all->count, sizeof *all->value, ascending);
	printf("{\"n\": %zu, \"avg_us\": %.1f, \"p50_us\": %u, \"p95_us\": %u, \"p99_us\": %u, \"max_us\": %u}", all->count, all->sum / (double)all->count,
		all->value[all->count / 2], all->value[(size_t)((double)all->count * .95)], all->value[(size_t)((double)all->count * .99)], all->value[all->count - 1]);
}

static void print_latency(const char *name, Client *clients, int count, const Role *role, size_t offset, int *printed) {
	Series all = {0};
	for (int i = 0; i < count; i++) {
		if (clients[i].role != role) continue;
		Series *series = (Series *)((char *)&clients[i] + offset);
		for (size_t k = 0; k < series->count; k++) push(&all, series->value[k]);
	}
	if (!all.count) return;
	printf("%s\"%s\": ", (*printed)++ ? ", " : "", name);
	print_percentiles(&all);
	free(all.value);
}

static void print_intervals(Client *clients, int count, const Role *role, double elapsed) {
	long intervals = (long)(elapsed * 1000) / interval_ms;
	Series *first = allocate((size_t)(intervals + 1) * sizeof *first);
	long *tasks = allocate((size_t)(intervals + 1) * sizeof *tasks);
	for (int i = 0; i < count; i++) {
		if (clients[i].role != role) continue;
		for (size_t k = 0; k < clients[i].ended.count; k++) {
			long at = clients[i].ended.value[k] / interval_ms;
			if (at > intervals) continue;
			push(&first[at], clients[i].first.value[k]);
			tasks[at] += clients[i].taken.value[k];
		}
	}
	printf(", \"series\": [");
	for (long at = 0; at < intervals; at++) { /* the last interval is not whole */
		printf("%s{\"ms\": %ld, \"tasks\": %ld", at ? ", " : "", at * interval_ms, tasks[at]);
		if (first[at].count) {
			printf(", \"claim\": ");
			print_percentiles(&first[at]);
		}
		printf("}");
		free(first[at].value);
	}
	printf("]");
	free(first[intervals].value);
	free(first);
	free(tasks);
}

static void print_role(Client *clients, int count, const Role *role, double elapsed) {
	long iterations = 0, tasks = 0, empties = 0, errors = 0;
	const char *last = "";
	for (int i = 0; i < count; i++) {
		if (clients[i].role != role) continue;
		iterations += clients[i].iterations;
		tasks += clients[i].tasks;
		empties += clients[i].empties;
		errors += clients[i].errors;
		for (char *c = clients[i].error; *c; c++)
			if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = ' ';
		if (clients[i].error[0]) last = clients[i].error;
	}
	printf(", \"%s\": {\"iterations\": %ld, \"tasks\": %ld, \"rate\": %.1f, \"empty\": %ld, \"errors\": %ld, \"error\": \"%s\", \"latency\": {",
		role->name, iterations, tasks, (double)tasks / elapsed, empties, errors, last);
	int printed = 0, number = 0;
	for (int i = 0; i < role->script.count; i++) {
		if (!role->script.statement[i].sql) continue;
		char name[24];
		snprintf(name, sizeof name, "statement%d", number++);
		print_latency(name, clients, count, role, offsetof(Client, statement) + (size_t)i * sizeof(Series), &printed);
	}
	print_latency("iteration", clients, count, role, offsetof(Client, iteration), &printed);
	print_latency("empty", clients, count, role, offsetof(Client, empty), &printed);
	print_latency("waited", clients, count, role, offsetof(Client, waited), &printed);
	printf("}");
	if (interval_ms && !role->produces && role->script.count) print_intervals(clients, count, role, elapsed);
	printf("}");
}

static void parse_option(Role *role, char *option) {
	char *value = strchr(option, '=');
	if (!value) die("option %s has no value", option);
	*value++ = 0;
	if (!strcmp(option, "rate")) role->rate = atof(value);
	else if (!strcmp(option, "listen")) role->listen = value;
	else if (!strcmp(option, "poll")) role->poll_ms = atoi(value);
	else if (!strcmp(option, "per")) role->per = atol(value);
	else if (!strcmp(option, "feed")) role->feed = atol(value);
	else if (!strcmp(option, "drain")) role->drain = atoi(value);
	else if (!strcmp(option, "lat")) role->column = value;
	else if (!strcmp(option, "init")) parse(&role->init, value);
	else if (!strcmp(option, "pooled")) role->pooled = atoi(value);
	else die("unknown option %s", option);
}

static void parse_role(Role *role, const char *argument) {
	char *text = copy(argument), *rest, *options;
	role->name = strtok_r(text, ":", &rest);
	char *file = strtok_r(NULL, ":", &rest), *clients = strtok_r(NULL, ":", &rest), *list = strtok_r(NULL, "", &rest);
	if (!role->name || !file || !clients) die("%s: not NAME:FILE:CLIENTS", argument);
	role->clients = atoi(clients);
	role->produces = !strncmp(role->name, "prod", 4);
	role->per = 1;
	for (char *option = list ? strtok_r(list, ",", &options) : NULL; option; option = strtok_r(NULL, ",", &options)) parse_option(role, option);
	if (strcmp(file, "-")) parse(&role->script, file);
}

int main(int count, char **arguments) {
	for (int option; (option = getopt(count, arguments, "d:p:T:n:b:i:x")) != -1;) switch (option) {
			case 'd': conninfo = optarg; break;
			case 'p': pooler = optarg; break;
			case 'T': seconds = atof(optarg); break;
			case 'n': most_tasks = atol(optarg); break;
			case 'b': atomic_store(&produced, atol(optarg)); break;
			case 'i': interval_ms = atol(optarg); break;
			case 'x': unnamed = 1; break;
			default: return 2;
		}
	memset(pad, 'x', PAD);
	int roles = count - optind, total = 0;
	if (!roles) die("no role");
	Role *role = allocate((size_t)roles * sizeof *role);
	for (int i = 0; i < roles; i++) {
		parse_role(&role[i], arguments[optind + i]);
		total += role[i].clients;
	}
	Client *clients = allocate((size_t)total * sizeof *clients);
	pthread_barrier_init(&ready, NULL, (unsigned)total + 1);
	for (int i = 0, k = 0; i < roles; i++)
		for (int j = 0; j < role[i].clients; j++, k++) {
			clients[k].role = &role[i];
			clients[k].id = k;
			clients[k].index = j;
			if (pthread_create(&clients[k].thread, NULL, run, &clients[k])) die("cannot start a thread");
		}
	pthread_barrier_wait(&ready);
	start = now();
	pthread_barrier_wait(&ready);
	for (int i = 0; i < total; i++) pthread_join(clients[i].thread, NULL);
	double elapsed = now() - start;
	printf("{\"elapsed\": %.3f", elapsed);
	for (int i = 0; i < roles; i++) print_role(clients, total, &role[i], elapsed);
	printf("}\n");
	return 0;
}
