/* What the ranks of a group say to each other. Each is a process; they share memory, in which they take turns.

   In a turn each rank writes its part into a place of its own, says that it has, waits until all have, and reads the
   others' parts. Each rank has two places, for odd and for even turns: a rank that takes the next turn has read what
   was written in the last one, so its writer may write to the first place again in the turn after that.

   A rank that waits looks for a moment, then sleeps on a futex. Whoever waits in a group that has ended is told so. */

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MOST_RANKS = 16,
    NAP_NS = 100000000, /* of sleep, after which a rank looks whether the group has ended */
};

struct seat {
    _Atomic uint32_t turn; /* the last one that the rank has taken */
    _Atomic uint32_t read; /* how many orders it has read */
    char rest[56];         /* so that each is in a cache line of its own */
};

struct table {
    _Atomic uint32_t told;     /* how many orders rank 0 has given */
    _Atomic uint32_t ended;    /* whether nobody is to wait any more */
    _Atomic uint32_t sleeping; /* how many ranks may be asleep */
    char rest[52];
    struct seat seats[MOST_RANKS];
    float places[]; /* [rank][2][numbers] */
};

struct member {
    struct table *table;
    long rank, width, numbers; /* numbers that a place holds */
    long adding_ns;            /* spent in sums so far */
};

static void say(struct table *table, _Atomic uint32_t *word, uint32_t value) {
    atomic_store(word, value);
    if (atomic_load(&table->sleeping)) syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wait until *word has come to `value`. Returns nonzero if the group ended meanwhile. */
static int hear(struct table *table, _Atomic uint32_t *word, uint32_t value) {
    for (const long end = now_ns() + SPIN_NS; now_ns() < end;)
        for (int round = 0; round < 32; round++) {
            if ((int32_t)(atomic_load(word) - value) >= 0) return 0;
            relax();
        }
    const struct timespec nap = {.tv_nsec = NAP_NS};
    int waits = 1, ended = 0;
    atomic_fetch_add(&table->sleeping, 1);
    while (waits && !ended) {
        const uint32_t seen = atomic_load(word);
        waits = (int32_t)(seen - value) < 0;
        ended = waits && atomic_load(&table->ended);
        if (waits && !ended) syscall(SYS_futex, word, FUTEX_WAIT, seen, &nap, NULL, 0);
    }
    atomic_fetch_sub(&table->sleeping, 1);
    return ended;
}

static float *place_of(const struct member *me, long rank, uint32_t turn) {
    return me->table->places + (2 * rank + turn % 2) * me->numbers;
}

/* The turn that the rank takes next. */
static uint32_t next_turn(const struct member *me) { return atomic_load(&me->table->seats[me->rank].turn) + 1; }

/* Take a turn, once the rank's part of it is in its place. Returns nonzero if the group has ended. */
static int take_turn(const struct member *me, uint32_t turn) {
    struct seat *seats = me->table->seats;
    say(me->table, &seats[me->rank].turn, turn);
    for (long rank = 0; rank < me->width; rank++)
        if (rank != me->rank && hear(me->table, &seats[rank].turn, turn)) return 1;
    return 0;
}

/* Replace x, `count` numbers, by the sum of all ranks', in the order of the ranks. Returns nonzero if the group has
   ended. */
int baton_group_add(struct member *me, float *x, long count) {
    const long begin = now_ns();
    for (long num; count; x += num, count -= num) {
        num = count < me->numbers ? count : me->numbers;
        const uint32_t turn = next_turn(me);
        memcpy(place_of(me, me->rank, turn), x, num * sizeof *x);
        if (take_turn(me, turn)) return 1;
        memcpy(x, place_of(me, 0, turn), num * sizeof *x);
        for (long rank = 1; rank < me->width; rank++) {
            const float *theirs = place_of(me, rank, turn);
            long i = 0;
            for (; i + 8 <= num; i += 8) store((char *)(x + i), floats(x + i) + floats(theirs + i), F32);
            for (; i < num; i++) x[i] += theirs[i];
        }
    }
    me->adding_ns += now_ns() - begin;
    return 0;
}

/* Put the ranks' parts of `rows` rows of `columns` numbers side by side into `out`, at rank 0. Returns nonzero if the
   group has ended. */
int baton_group_beside(const struct member *me, const float *part, long rows, long columns, float *out) {
    const long width = me->width, own = columns * (me->rank + 1) / width - columns * me->rank / width;
    const long most = me->numbers / ((columns + width - 1) / width); /* rows of a turn */
    for (long first = 0; first < rows; first += most) {
        const long num = rows - first < most ? rows - first : most;
        const uint32_t turn = next_turn(me);
        memcpy(place_of(me, me->rank, turn), part + first * own, num * own * sizeof *part);
        if (take_turn(me, turn)) return 1;
        for (long rank = 0; rank < width && me->rank == 0; rank++) {
            const long begin = columns * rank / width, size = columns * (rank + 1) / width - begin;
            const float *theirs = place_of(me, rank, turn);
            for (long row = 0; row < num; row++)
                memcpy(out + (first + row) * columns + begin, theirs + row * size, size * sizeof *out);
        }
    }
    return 0;
}

/* Wait until all have read the last order, whose place the next one takes. Returns nonzero if the group has ended. */
int baton_group_wait_for_readers(const struct member *me) {
    struct table *table = me->table;
    for (long rank = 0; rank < me->width; rank++)
        if (rank != me->rank && hear(table, &table->seats[rank].read, atomic_load(&table->told))) return 1;
    return 0;
}

/* Give the next order, which is in the shared memory. */
void baton_group_tell(const struct member *me) {
    say(me->table, &me->table->told, atomic_load(&me->table->told) + 1);
}

/* Wait for the order after the last one that this rank has read. Returns nonzero if the group has ended. */
int baton_group_hear(const struct member *me) {
    return hear(me->table, &me->table->told, atomic_load(&me->table->seats[me->rank].read) + 1);
}

/* Say that this rank has read one more order. */
void baton_group_has_read(const struct member *me) {
    _Atomic uint32_t *read = &me->table->seats[me->rank].read;
    say(me->table, read, atomic_load(read) + 1);
}

/* Let nobody wait any more. */
void baton_group_end(struct table *table) { atomic_store(&table->ended, 1); }

long baton_group_table_bytes(void) { return sizeof(struct table); }
