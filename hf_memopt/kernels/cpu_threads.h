/* Threads for the CPU kernel: a pool that lives as long as the process, and a barrier.
 *
 * A step calls the kernel once per parameter, hundreds of times in a row, so starting threads each time would cost as
 * much as small parameters take. Whoever waits looks again for some microseconds before it sleeps, since waking a
 * sleeper takes longer than that. One caller has the pool at a time; another one that comes meanwhile works alone,
 * with the same results. After a fork the child starts a pool of its own. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#define MAX_THREADS 256
#define LOOKS 1000 /* before sleeping */

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    atomic_uint round;
    atomic_int waiting;
    int threads;
} Barrier;

typedef struct Team {
    Barrier barrier;
    void (*work)(struct Team *, int thread); /* the first member of the caller's structure is its Team */
} Team;

static struct {
    pthread_mutex_t owner, lock;
    pthread_cond_t changed;
    atomic_uint round; /* counts teams; the rest is read and written under the lock */
    atomic_int running;
    Team *team;
    int threads, started, fork_handled;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, NULL, 0, 0, 0};

INLINE void pause_briefly(void) {
#if defined(__SSE__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Until *word differs from `old`. Writers change it under the lock and then signal. */
static void await_change(atomic_uint *word, unsigned old, pthread_mutex_t *lock, pthread_cond_t *changed) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load(word) != old) return;
        pause_briefly();
    }
    pthread_mutex_lock(lock);
    while (atomic_load(word) == old) pthread_cond_wait(changed, lock);
    pthread_mutex_unlock(lock);
}

static void wait_for_all(Team *team) {
    Barrier *b = &team->barrier;
    if (b->threads == 1) return;
    unsigned round = atomic_load(&b->round);
    if (atomic_fetch_add(&b->waiting, 1) + 1 < b->threads) {
        await_change(&b->round, round, &b->lock, &b->changed);
        return;
    }
    atomic_store(&b->waiting, 0);
    pthread_mutex_lock(&b->lock);
    atomic_fetch_add(&b->round, 1);
    pthread_cond_broadcast(&b->changed);
    pthread_mutex_unlock(&b->lock);
}

/* Subnormal numbers count: the caller may have set flush-to-zero (torch.set_flush_denormal), and the numbers must not
 * depend on it. */
static void run_with_default_arithmetic(Team *team, int thread) {
#if defined(__SSE__)
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80);
    team->work(team, thread);
    _mm_setcsr(saved);
#elif defined(__aarch64__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    team->work(team, thread);
    __asm__ volatile("msr fpcr, %0" ::"r"(saved));
#else
    team->work(team, thread);
#endif
}

static void *pool_thread(void *arg) {
    const int thread = (int)(intptr_t)arg;
    pthread_mutex_lock(&pool.lock);
    unsigned round = atomic_load(&pool.round) - 1; /* it was started for the team of this round, which waits for it */
    pthread_mutex_unlock(&pool.lock);
    for (;;) {
        await_change(&pool.round, round, &pool.lock, &pool.changed);
        pthread_mutex_lock(&pool.lock);
        round = atomic_load(&pool.round);
        Team *team = thread < pool.threads ? pool.team : NULL;
        pthread_mutex_unlock(&pool.lock);
        if (!team) continue;
        run_with_default_arithmetic(team, thread);
        if (atomic_fetch_sub(&pool.running, 1) > 1) continue;
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.changed);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

static void forget_threads(void) {
    pthread_mutex_init(&pool.owner, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.changed, NULL);
    pool.started = 0;
}

/* As many of `count` further threads as the system gives. They take no signals. */
static void start_threads(int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < count) {
        pthread_t id;
        if (pthread_create(&id, NULL, pool_thread, (void *)(intptr_t)(pool.started + 1))) break;
        pthread_detach(id);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* team->work on up to `wanted` threads, of which the caller is thread 0. */
static void run(Team *team, int wanted) {
    wanted = wanted > MAX_THREADS ? MAX_THREADS : wanted;
    team->barrier.threads = 1;
    if (wanted <= 1 || pthread_mutex_trylock(&pool.owner)) {
        run_with_default_arithmetic(team, 0);
        return;
    }
    Barrier *b = &team->barrier;
    pthread_mutex_init(&b->lock, NULL);
    pthread_cond_init(&b->changed, NULL);
    pthread_mutex_lock(&pool.lock);
    if (!pool.fork_handled) pool.fork_handled = !pthread_atfork(NULL, NULL, forget_threads);
    start_threads(wanted - 1);
    pool.team = team;
    pool.threads = b->threads = wanted < pool.started + 1 ? wanted : pool.started + 1;
    atomic_store(&pool.running, pool.threads - 1);
    atomic_fetch_add(&pool.round, 1);
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.lock);

    run_with_default_arithmetic(team, 0);

    for (int i = 0; i < LOOKS && atomic_load(&pool.running); i++) pause_briefly();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.running)) pthread_cond_wait(&pool.changed, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_destroy(&b->lock);
    pthread_cond_destroy(&b->changed);
    pthread_mutex_unlock(&pool.owner);
}
