/* Shares the units of a job among the thread that asks and helpers of its own.

   The thread that asks waits for the units that helpers have begun, never for a helper that has not come: on a machine
   whose processors are busy, a helper may be late by a time slice, which is a hundred times a kernel. OpenMP's regions
   end when all of their threads have arrived. */

#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

/* Does one unit of a job. Returns nonzero if that failed. */
typedef int (*work)(void *job, long unit);

enum {
    MOST_HELPERS = 255,
    SPIN_NS = 50000, /* how long a helper looks for the next job before it sleeps: waking takes longer than most kernels */
    PATIENCE = 1000, /* rounds of waiting after which a processor is left to others */
};
#define CLOSED (LONG_MAX / 2)
#define RETRY_NS 1000000000L /* how long no helper is started after one could not be */

static struct {
    atomic_flag taken;       /* by a thread with a job; another one does its job alone */
    _Atomic(work) run;
    void *_Atomic job;
    atomic_long units, next, done; /* of the job, the next one to be taken (CLOSED: no job), how many are done */
    atomic_int helpers, failed;    /* how many helpers the job wants, whether a unit failed */
    atomic_int inside;             /* helpers that may look at the job */
    atomic_uint number;            /* of jobs so far */
    atomic_int sleeping;
    int started;
    pthread_mutex_t lock;
    pthread_cond_t woken;
} crew = {.taken = ATOMIC_FLAG_INIT,
          .next = CLOSED,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .woken = PTHREAD_COND_INITIALIZER};

static void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#endif
}

/* Wait a little, for the `round`th time. */
static void wait_for_others(long round) {
    relax();
    if (round > PATIENCE) sched_yield();
}

static void take_units(void) {
    for (;;) {
        const long unit = atomic_fetch_add(&crew.next, 1); /* `units`, which is stored first, is read last */
        if (unit >= atomic_load(&crew.units)) return;
        if (atomic_load(&crew.run)(atomic_load(&crew.job), unit)) atomic_store(&crew.failed, 1);
        atomic_fetch_add(&crew.done, 1);
    }
}

static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000L + now.tv_nsec;
}

/* Wait until there were other than `seen` jobs. */
static void await_job(unsigned seen) {
    for (const long end = now_ns() + SPIN_NS; now_ns() < end;)
        for (int round = 0; round < 32; round++) {
            if (atomic_load(&crew.number) != seen) return;
            relax();
        }
    pthread_mutex_lock(&crew.lock);
    atomic_fetch_add(&crew.sleeping, 1);
    while (atomic_load(&crew.number) == seen) pthread_cond_wait(&crew.woken, &crew.lock);
    atomic_fetch_sub(&crew.sleeping, 1);
    pthread_mutex_unlock(&crew.lock);
}

static void *help(void *index) {
    for (unsigned seen = 0;;) {
        await_job(seen);
        seen = atomic_load(&crew.number);
        if ((long)index >= atomic_load(&crew.helpers)) continue; /* nobody waits for a helper that is not wanted */
        atomic_fetch_add(&crew.inside, 1); /* from here on the job does not change until this helper has left */
        take_units();
        atomic_fetch_sub(&crew.inside, 1);
    }
    return NULL;
}

/* In a process that was forked there are no helpers. */
static void forget_helpers(void) {
    crew.started = 0;
    atomic_store(&crew.inside, 0);
    atomic_store(&crew.sleeping, 0);
    atomic_store(&crew.next, CLOSED);
    atomic_store(&crew.number, 0);
    atomic_flag_clear(&crew.taken);
    pthread_mutex_init(&crew.lock, NULL);
    pthread_cond_init(&crew.woken, NULL);
}

/* Start as many helpers as are still missing. If that fails, there are fewer, and it is tried again later. Signals are
   for the other threads. */
static void start_helpers(int wanted) {
    static int registered; /* for forks, also in a process that was forked */
    static long retry_at_ns;
    if (now_ns() < retry_at_ns) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    if (!registered) registered = !pthread_atfork(NULL, NULL, forget_helpers);
    for (pthread_t helper; crew.started < wanted && crew.started < MOST_HELPERS; crew.started++) {
        if (pthread_create(&helper, NULL, help, (void *)(long)crew.started)) {
            retry_at_ns = now_ns() + RETRY_NS;
            break;
        }
        pthread_detach(helper);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Do the units `[0, units)` of a job, with up to `threads` threads. Returns whether one has failed. */
static int share(long units, int threads, work run, void *job) {
    int failed = 0;
    if (threads > units) threads = units;
    if (threads <= 1 || atomic_flag_test_and_set(&crew.taken)) {
        for (long unit = 0; unit < units; unit++) failed |= run(job, unit);
        return failed;
    }
    if (crew.started < threads - 1) start_helpers(threads - 1);
    for (long round = 0; atomic_load(&crew.inside); round++) wait_for_others(round);
    atomic_store(&crew.run, run);
    atomic_store(&crew.job, job);
    atomic_store(&crew.units, units);
    atomic_store(&crew.helpers, threads - 1);
    atomic_store(&crew.done, 0);
    atomic_store(&crew.failed, 0);
    atomic_store(&crew.next, 0);
    atomic_fetch_add(&crew.number, 1);
    if (atomic_load(&crew.sleeping)) {
        pthread_mutex_lock(&crew.lock);
        pthread_cond_broadcast(&crew.woken);
        pthread_mutex_unlock(&crew.lock);
    }
    take_units();
    for (long round = 0; atomic_load(&crew.done) < units; round++) wait_for_others(round);
    atomic_store(&crew.next, CLOSED);
    failed = atomic_load(&crew.failed);
    atomic_flag_clear(&crew.taken);
    return failed;
}
