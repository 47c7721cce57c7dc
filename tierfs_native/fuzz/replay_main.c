/*
 * Runs a libFuzzer entry point without libFuzzer: replays what it is given, then mutates it, without feedback on which
 * branches were reached. The options are those of libFuzzer, so that nobody has to know which of the two was linked:
 *
 *   fuzz_NAME [-runs=N] [-seed=N] [-max_len=BYTES] [-max_total_time=SECONDS] [FILE|DIRECTORY...]
 *
 * The same seed and the same files give the same inputs. The input of a crash is left in ./crash-RUN.
 */
#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SEEDS_MAX 1000u
#define SEED_MAX_BYTES (1u << 20)
#define MUTATIONS_MAX 8u
#define KEPT 64u /* mutated inputs that are mutated again */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
/* A fuzzer may have this: it then makes half of the inputs, from one that exists. */
__attribute__((weak)) size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size,
                                                     unsigned int seed);
__attribute__((weak)) int LLVMFuzzerInitialize(int *argc, char ***argv);
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

struct input {
    uint8_t *data;
    size_t size;
};

struct options {
    uint64_t runs, seed, max_len, max_total_time_s;
};

/* What a dying process has to leave behind, hence global: handlers have no argument. */
static struct input current;
static uint64_t current_run;

static void leave_crash(void)
{
    char name[64];
    int file;

    snprintf(name, sizeof name, "crash-%" PRIu64, current_run);
    file = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0 || write(file, current.data, current.size) != (ssize_t)current.size)
        fprintf(stderr, "the input of run %" PRIu64 " could not be kept\n", current_run);
    else
        fprintf(stderr, "the input of run %" PRIu64 " is in %s\n", current_run, name);
}

static void on_abort(int signal_number)
{
    (void)signal_number; /* the default action follows: the handler was for one time only */
    leave_crash();
}

/* xorshift64*: the same everywhere. */
static uint64_t random_u64(uint64_t *state)
{
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * UINT64_C(2685821657736338717);
}

static size_t random_below(uint64_t *state, size_t limit)
{
    return limit == 0 ? 0 : (size_t)(random_u64(state) % limit);
}

/* Values at which lengths, counts and offsets go wrong. */
static void put_interesting(uint64_t *state, uint8_t *data, size_t size)
{
    /* clang-format off */
    static const uint64_t values[] = {
        0, 1, 2, 7, 8, 16, 24, 40, 127, 128, 255, 256, 4095, 4096, INT16_MAX, UINT16_MAX, INT32_MAX, UINT32_MAX,
        UINT64_C(1) << 31, UINT32_MAX - 7, INT64_MAX, UINT64_C(1) << 63, UINT64_MAX,
    };
    /* clang-format on */
    size_t width = (size_t)1 << random_below(state, 4);
    uint64_t value = values[random_below(state, sizeof values / sizeof values[0])];

    if (random_below(state, 4) == 0)
        value = size;
    if (size >= width)
        memcpy(data + random_below(state, size - width + 1), &value, width);
}

static size_t mutate_once(uint64_t *state, uint8_t *data, size_t size, size_t capacity,
                          const struct input *other)
{
    size_t at = random_below(state, size);
    size_t length;

    switch (random_below(state, 8)) {
    case 0:
        if (size != 0)
            data[at] ^= (uint8_t)(1u << random_below(state, 8));
        return size;
    case 1:
        if (size != 0)
            data[at] = (uint8_t)random_u64(state);
        return size;
    case 2:
    case 3:
        put_interesting(state, data, size);
        return size;
    case 4: /* insert */
        length = 1 + random_below(state, 32);
        if (length > capacity - size)
            return size;
        memmove(data + at + length, data + at, size - at);
        for (size_t i = 0; i < length; i++)
            data[at + i] = (uint8_t)random_u64(state);
        return size + length;
    case 5: /* remove */
        length = random_below(state, size - at + 1);
        memmove(data + at, data + at + length, size - at - length);
        return size - length;
    case 6: /* cut */
        return random_below(state, size + 1);
    default: /* go on with the end of another one */
        length = other->size == 0 ? 0 : random_below(state, other->size);
        if (at + (other->size - length) > capacity)
            return size;
        if (other->size != 0)
            memcpy(data + at, other->data + length, other->size - length);
        return at + (other->size - length);
    }
}

/* Each input has a block of exactly its size, so that a sanitizer sees the first byte too many. */
static void run_one(const uint8_t *data, size_t size)
{
    current.data = malloc(size == 0 ? 1 : size);
    assert(current.data != NULL);
    if (size != 0)
        memcpy(current.data, data, size);
    current.size = size;
    LLVMFuzzerTestOneInput(current.data, size);
    free(current.data);
    current = (struct input){NULL, 0};
    current_run++;
}

static void keep(struct input *slot, const uint8_t *data, size_t size)
{
    free(slot->data);
    slot->data = malloc(size == 0 ? 1 : size);
    assert(slot->data != NULL);
    if (size != 0)
        memcpy(slot->data, data, size);
    slot->size = size;
}

static void load_file(const char *path, struct input *seeds, size_t *count)
{
    static uint8_t buffer[SEED_MAX_BYTES];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : read(file, buffer, sizeof buffer);

    if (got < 0) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        exit(1);
    }
    close(file);
    if (*count < SEEDS_MAX)
        keep(&seeds[(*count)++], buffer, (size_t)got);
}

/* In the order of their names, which a directory does not promise. */
static void load(const char *path, struct input *seeds, size_t *count)
{
    struct dirent **entries;
    struct stat status;
    int found;

    if (stat(path, &status) != 0 || !S_ISDIR(status.st_mode)) {
        load_file(path, seeds, count);
        return;
    }
    found = scandir(path, &entries, NULL, alphasort);
    for (int i = 0; i < found; i++) {
        char file[4096];

        if (entries[i]->d_name[0] != '.' &&
            snprintf(file, sizeof file, "%s/%s", path, entries[i]->d_name) < (int)sizeof file)
            load_file(file, seeds, count);
        free(entries[i]);
    }
    if (found >= 0)
        free(entries);
}

static bool set_option(const char *argument, struct options *options)
{
    const struct {
        const char *name;
        uint64_t *value;
    } known[] = {{"-runs=", &options->runs},
                 {"-seed=", &options->seed},
                 {"-max_len=", &options->max_len},
                 {"-max_total_time=", &options->max_total_time_s}};

    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        size_t length = strlen(known[i].name);

        if (strncmp(argument, known[i].name, length) == 0) {
            *known[i].value = strtoull(argument + length, NULL, 10);
            return true;
        }
    }
    return argument[0] == '-'; /* another option of libFuzzer: nothing to do here */
}

/* pool: the seeds, then KEPT places of which the first so many are in use. */
static void fuzz(const struct options *options, struct input *pool, size_t seeds)
{
    uint64_t state = options->seed * 2 + 1; /* never 0, for which xorshift stands still */
    uint8_t *data = malloc(options->max_len);
    size_t used = seeds;
    time_t start = time(NULL);

    assert(data != NULL);
    for (uint64_t run = 0; run < options->runs; run++) {
        const struct input *base = &pool[random_below(&state, used)];
        size_t size = base->size < options->max_len ? base->size : options->max_len;
        size_t mutations = 1 + random_below(&state, MUTATIONS_MAX);

        if (options->max_total_time_s != 0 && run % 256 == 0 &&
            time(NULL) - start >= (time_t)options->max_total_time_s)
            break;
        if (size != 0)
            memcpy(data, base->data, size);
        if (LLVMFuzzerCustomMutator != NULL && random_below(&state, 2) == 0) {
            size = LLVMFuzzerCustomMutator(data, size, options->max_len, (unsigned int)random_u64(&state));
            assert(size <= options->max_len);
        } else {
            for (size_t i = 0; i < mutations; i++)
                size = mutate_once(&state, data, size, options->max_len, &pool[random_below(&state, used)]);
        }
        run_one(data, size);
        if (random_below(&state, 16) == 0) {
            size_t place = seeds + random_below(&state, KEPT);

            if (place >= used)
                place = used++;
            keep(&pool[place], data, size);
        }
    }
    free(data);
    for (size_t i = 0; i < used; i++)
        free(pool[i].data);
}

int main(int argc, char **argv)
{
    struct options options = {
        .runs = UINT64_MAX, .seed = (uint64_t)time(NULL), .max_len = 4096, .max_total_time_s = 0};
    struct input *pool = calloc(SEEDS_MAX + KEPT, sizeof *pool);
    size_t seeds = 0;

    assert(pool != NULL);
    if (LLVMFuzzerInitialize != NULL)
        LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++)
        if (!set_option(argv[i], &options))
            load(argv[i], pool, &seeds);
    if (options.max_len == 0)
        options.max_len = 1;
    if (__sanitizer_set_death_callback != NULL)
        __sanitizer_set_death_callback(leave_crash);
    struct sigaction action = {.sa_handler = on_abort, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGABRT, &action, NULL);

    run_one(NULL, 0);
    for (size_t i = 0; i < seeds; i++)
        run_one(pool[i].data, pool[i].size);
    if (seeds == 0)
        keep(&pool[seeds++], (const uint8_t *)"", 0);
    fuzz(&options, pool, seeds);
    free(pool);
    fprintf(stderr, "%" PRIu64 " runs, seed %" PRIu64 "\n", current_run, options.seed);
    return 0;
}
