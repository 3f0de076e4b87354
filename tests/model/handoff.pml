/* The handoff as a model for SPIN: one gateway, one prefill worker (the source), two decode workers (the sinks).
 *
 * One request, of two blocks. Every worker has room for one sequence, so that whoever comes next gets the blocks that
 * the last one had. Messages between two processes keep their order. Within the budgets below, at any moment: a message
 * between source and sink is lost, a worker crashes and comes back, a lease expires, the client leaves, a decode worker
 * refuses, an old Decode arrives once more. Reads end late, and copy what the source's blocks hold at that moment.
 *
 * tests/model/run_spin.py checks the five properties at the end, and that each breakage (-DNO_SETTLE and so on) breaks
 * one. The steps of pulls and leases are written PULL_TO(who, from, to) and LEASE_TO(from, to): test_model_tables.py
 * compares them with kv_transfer/sink.py and with what kv_transfer/source.py was seen to do.
 */

#ifndef ATTEMPTS
#define ATTEMPTS 3      /* attempts at the request; when they are used up, it fails */
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef LOSSES
#define LOSSES 1
#endif
#ifndef EXPIRIES
#define EXPIRIES 1
#endif
#ifndef ABORTS
#define ABORTS 1
#endif
#ifndef REFUSALS
#define REFUSALS 1
#endif
#ifndef REVOCATIONS
#define REVOCATIONS 1
#endif
#ifndef REPLAYS
#define REPLAYS 1
#endif
#ifndef DISTURBANCES
#define DISTURBANCES 1  /* of all kinds together */
#endif

#define LAST 2          /* tokens, from which on a decode worker ends the sequence */
#define NOBODY 2

mtype:pull = { IDLE, ATTACHING, OFFERED, PULLING, SETTLING, SETTLED, ABANDONED };
mtype:lease = { L_NONE, L_OPEN, L_GROWING, L_COMPLETE, L_SETTLED, L_ENDED };
mtype:owner = { FREE, HELD, QUARANTINED, LIMBO };
mtype:msg = {
  M_PREFILL, M_DECODE, M_ABORT,                        /* gateway to workers: attempt, offered or base, life */
  M_TOKENS, M_FAILED,                                  /* workers to gateway: attempt, end position, whether last */
  M_ATTACH, M_SETTLE, M_DETACH, M_HELLO,               /* sink to source: attempt, offered or epoch */
  M_READY, M_DONE, M_SETTLED, M_WITHDRAWN, M_WELCOME   /* source to sink: attempt, epoch, blocks or validity */
};

chan g2p = [8] of { mtype:msg, byte, byte, byte };
chan p2g = [8] of { mtype:msg, byte, byte, byte };
chan g2d[2] = [8] of { mtype:msg, byte, byte, byte };
chan d2g[2] = [8] of { mtype:msg, byte, byte, byte };
chan d2p[2] = [8] of { mtype:msg, byte, byte, byte };
chan p2d[2] = [8] of { mtype:msg, byte, byte, byte };

/* What the properties are about. */
bool unverified, two_owners, over, costly;
byte terminals;

/* What may still go wrong. `costly`: something other than a loss between source and sink, or a replay, has happened. */
byte budget = DISTURBANCES;
byte crashes = CRASHES, losses = LOSSES, expiries = EXPIRIES, aborts = ABORTS, refusals = REFUSALS, replays = REPLAYS;
byte revocations = REVOCATIONS;

/* --- the prefill worker ------------------------------------------------------------------------------------------ */

byte p_life = 1;
byte p_newest;                    /* the attempt fence */
byte p_owner;                     /* attempt that it works for, or holds a lease for; 0: none */
bool p_waiting, p_computing, p_pinned, p_step;
bool p_kv[2];                     /* whether its blocks hold the request's KV */
byte p_generation, step_generation, step_block;
byte p_ready, p_epoch, p_ended;   /* blocks that can be read; newest epoch; newest attempt whose offer has ended */
mtype:lease lease = L_NONE;
byte l_opened, l_attempt, l_sink = NOBODY;
byte parked_sink = NOBODY, parked_attempt, parked_offered;
byte told_attempt, told_epoch, told_sink = NOBODY;     /* the last settle that was answered `valid` */
bool lost_at_g, lost_at_d[2];     /* it has crashed, and that side has not noticed */

#ifdef NO_LIMBO
#define P_FREE (!p_pinned && !p_computing)
#else
#define P_FREE (!p_pinned && !p_computing && !p_step)
#endif

/* --- the decode workers ------------------------------------------------------------------------------------------ */

mtype:pull pull[2] = IDLE;
mtype:owner own[2] = FREE;        /* who has its blocks */
byte d_attempt[2], d_newest[2], d_offered[2], d_epoch[2], d_source[2], d_known[2], d_got[2], d_base[2], d_position[2];
bool d_done[2], d_reading[2], d_running[2], d_stepping[2], d_torn[2], d_asked[2];
byte d_generation[2], d_step_generation[2];
byte d_late[2];                   /* an abandoned pull's attempt whose read is still under way; 0: none */
byte d_late_source[2];
byte d_life_of_p[2] = 1;
byte d_late_block[2];
bool d_kv[4];                     /* whether block 2i + n of worker i holds the request's KV */
bool d_lost_at_g[2];

/* --- the gateway ------------------------------------------------------------------------------------------------- */

byte g_attempt, g_offer, g_d, g_next, g_base, g_life_of_p = 1;
bool g_spoken, g_over;
byte replay_attempt, replay_offer, replay_d, replay_base;

/* --- steps of pulls and leases ----------------------------------------------------------------------------------- */

inline PULL_TO(who, from, to) { assert(pull[who] == from); pull[who] = to }
inline LEASE_TO(from, to) { assert(lease == from); lease = to }

inline to_sink(who, kind, f1, f2, f3) { if :: !lost_at_d[who] -> p2d[who]!kind(f1, f2, f3) :: else fi }
inline to_source(who, kind, f1, f2) { if :: !lost_at_d[who] -> d2p[who]!kind(f1, f2, 0) :: else fi }
inline to_p(kind, f1, f2) { if :: !lost_at_g -> g2p!kind(f1, f2, 0) :: else fi }
inline to_d(who, kind, f1, f2, f3) { if :: !d_lost_at_g[who] -> g2d[who]!kind(f1, f2, f3) :: else fi }

/* What is free is soon somebody else's. */
inline p_wipe() { if :: P_FREE -> p_kv[0] = false; p_kv[1] = false :: else fi }

inline lease_over() {
  p_ended = (l_opened > p_ended -> l_opened : p_ended);
  l_sink = NOBODY; p_pinned = false; p_owner = 0;
  p_wipe()
}

/* Withdrawal, expiry or reclaim. */
inline lease_end() {
  if
  :: l_sink != NOBODY -> to_sink(l_sink, M_WITHDRAWN, l_attempt, 0, 0)
  :: else
  fi;
  if
  :: lease == L_OPEN -> LEASE_TO(L_OPEN, L_ENDED)
  :: lease == L_GROWING -> LEASE_TO(L_GROWING, L_ENDED)
  :: lease == L_COMPLETE -> LEASE_TO(L_COMPLETE, L_ENDED)
  fi;
  lease_over()
}

#define LEASE_HELD (lease == L_OPEN || lease == L_GROWING || lease == L_COMPLETE)

inline p_end() {
  p_waiting = false; p_computing = false;
  if
  :: LEASE_HELD -> lease_end()
  :: else ->
     p_ended = (p_owner > p_ended -> p_owner : p_ended);
     if
     :: parked_sink != NOBODY && parked_offered <= p_owner ->
        to_sink(parked_sink, M_WITHDRAWN, parked_attempt, 0, 0); parked_sink = NOBODY
     :: else
     fi
  fi;
  p_owner = 0;
  p_wipe()
}

inline bind(sink, attempt) {
  if
  :: l_sink != NOBODY && (l_sink != sink || l_attempt != attempt) -> to_sink(l_sink, M_WITHDRAWN, l_attempt, 0, 0)
  :: else
  fi;
  l_sink = sink; l_attempt = attempt;
  to_sink(sink, M_READY, attempt, p_epoch, p_ready);
  if
  :: lease == L_COMPLETE -> to_sink(sink, M_DONE, attempt, p_epoch, 0)
  :: else
  fi
}

inline attach(i, a, offered) {
  if
  :: LEASE_HELD && offered <= l_opened ->
     if
     :: a < l_attempt || offered < l_opened -> to_sink(i, M_WITHDRAWN, a, 0, 0)
     :: else -> bind(i, a)
     fi
  :: else ->
     if
     :: offered <= p_ended ->
        if
        :: told_attempt == a && told_sink == i     /* its Settle follows */
        :: else -> to_sink(i, M_WITHDRAWN, a, 0, 0)
        fi
     :: else ->
        if
        :: parked_sink != NOBODY && parked_attempt > a -> to_sink(i, M_WITHDRAWN, a, 0, 0)
        :: else ->
           if
           :: parked_sink != NOBODY && (parked_sink != i || parked_attempt != a) ->
              to_sink(parked_sink, M_WITHDRAWN, parked_attempt, 0, 0)
           :: else
           fi;
           parked_sink = i; parked_attempt = a; parked_offered = offered
        fi
     fi
  fi
}

inline settle(i, a, e) {
  if
  :: lease == L_COMPLETE && l_sink == i && l_attempt == a && p_epoch == e ->
     told_attempt = a; told_epoch = e; told_sink = i;
     LEASE_TO(L_COMPLETE, L_SETTLED);
     lease_over();
     to_sink(i, M_SETTLED, a, e, 1)
#ifndef NOT_IDEMPOTENT
  :: lease != L_COMPLETE && told_attempt == a && told_epoch == e && told_sink == i -> to_sink(i, M_SETTLED, a, e, 1)
#endif
  :: else -> to_sink(i, M_SETTLED, a, e, 0)
  fi
}

/* What a sink does not name (any more) it has given up. */
inline said_hello(i, a) {
  if
  :: parked_sink == i && parked_attempt != a -> parked_sink = NOBODY
  :: else
  fi;
  if
  :: LEASE_HELD && l_sink == i && l_attempt != a -> l_sink = NOBODY
  :: else
  fi
}

inline hear_sink(i) {
  if
  :: d2p[i]?M_ATTACH(a, x, _) -> attach(i, a, x)
  :: d2p[i]?M_SETTLE(a, x, _) -> settle(i, a, x)
  :: d2p[i]?M_DETACH(a, _, _) ->
     if
     :: parked_sink == i && parked_attempt == a -> parked_sink = NOBODY
     :: else
     fi;
     if
     :: LEASE_HELD && l_sink == i && l_attempt == a -> l_sink = NOBODY
     :: else
     fi
  :: d2p[i]?M_HELLO(a, _, _) -> said_hello(i, a); to_sink(i, M_WELCOME, 0, 0, 0)
  fi;
  a = 0; x = 0
}

inline open_lease() {
  p_waiting = false; p_computing = true; p_pinned = true; p_ready = 0;
  p_generation++; p_epoch++;
  lease = L_OPEN; l_opened = p_owner; l_attempt = p_owner; l_sink = NOBODY;
  if
  :: parked_sink != NOBODY && parked_offered <= p_owner ->
     x = parked_sink; a = parked_attempt; parked_sink = NOBODY;
     if
     :: parked_offered == p_owner -> bind(x, a)
     :: else -> to_sink(x, M_WITHDRAWN, a, 0, 0)
     fi
  :: else
  fi;
  a = 0; x = 0
}

/* A step has written its block, whoever has been aborted meanwhile. */
inline end_step() {
  if
  :: P_FREE || step_generation != p_generation -> two_owners = true
  :: else
  fi;
  p_step = false;
  p_kv[step_block] = true;
  if
  :: p_computing && step_generation == p_generation ->
     p_ready++;
     if
     :: p_ready == 1 -> LEASE_TO(L_OPEN, L_GROWING)
     :: else -> LEASE_TO(L_GROWING, L_COMPLETE)
     fi;
     if
     :: l_sink != NOBODY ->
        to_sink(l_sink, M_READY, l_attempt, p_epoch, p_ready);
        if
        :: p_ready == 2 -> to_sink(l_sink, M_DONE, l_attempt, p_epoch, 0)
        :: else
        fi
     :: else
     fi;
     if
     :: p_ready == 2 -> p_computing = false; if :: !lost_at_g -> p2g!M_TOKENS(l_opened, 0, 0) :: else fi
     :: else
     fi
  :: else
  fi;
  p_wipe()
}

proctype Prefill() {
  byte a, x;
end:
  do
  :: atomic { g2p?M_PREFILL(a, _, _) ->
       if
#ifdef NO_FENCE
       :: true ->
#else
       :: a > p_newest ->
#endif
          p_newest = a;
          if
          :: p_owner -> p_end()
          :: else
          fi;
          p_owner = a; p_waiting = true
#ifndef NO_FENCE
       :: else
#endif
       fi;
       a = 0 }
  :: atomic { g2p?M_ABORT(a, _, _) ->
       if
       :: p_owner && p_owner <= a -> p_end()
       :: else
       fi;
       a = 0 }
  :: atomic { p_waiting && P_FREE -> open_lease() }
  :: atomic { p_computing && !p_step -> p_step = true; step_generation = p_generation; step_block = p_ready }
  :: atomic { p_step -> end_step() }
  :: atomic { nempty(d2p[0]) -> hear_sink(0) }
  :: atomic { nempty(d2p[1]) -> hear_sink(1) }
  od
}

/* --- a decode worker --------------------------------------------------------------------------------------------- */

inline failed(i) { if :: !d_lost_at_g[i] -> d2g[i]!M_FAILED(d_attempt[i], 0, 0) :: else fi }

inline give_back(i) {
#ifndef NO_LIMBO
  if
  :: d_stepping[i] -> own[i] = LIMBO
  :: else -> own[i] = FREE
  fi
#else
  own[i] = FREE
#endif
}

inline abandon(i) {
  if
  :: pull[i] == ATTACHING -> PULL_TO(i, ATTACHING, ABANDONED)
  :: pull[i] == OFFERED -> PULL_TO(i, OFFERED, ABANDONED)
  :: pull[i] == PULLING -> PULL_TO(i, PULLING, ABANDONED)
  :: pull[i] == SETTLING -> PULL_TO(i, SETTLING, ABANDONED)
  fi;
  if
  :: d_reading[i] ->
     d_reading[i] = false;
     d_late[i] = d_attempt[i]; d_late_source[i] = d_source[i]; d_late_block[i] = d_got[i];
#ifdef NO_QUARANTINE
     own[i] = FREE
#else
     own[i] = QUARANTINED
#endif
  :: else ->
     if
     :: own[i] == HELD -> give_back(i)
     :: else
     fi;
     to_source(i, M_DETACH, d_attempt[i], 0)
  fi
}

#define PULLS(i) (pull[i] == ATTACHING || pull[i] == OFFERED || pull[i] == PULLING || pull[i] == SETTLING)

inline forget(i) {
  if
  :: PULLS(i) -> abandon(i)
  :: else
  fi;
  if
  :: d_running[i] -> d_running[i] = false; give_back(i)
  :: else
  fi
}

inline decode(i, a, offered, base, life) {
  if
#ifdef NO_FENCE
  :: true ->
#else
  :: a > d_newest[i] ->
#endif
     forget(i);
     d_newest[i] = a; d_attempt[i] = a; d_offered[i] = offered; d_base[i] = base; d_source[i] = life;
     d_epoch[i] = 0; d_known[i] = 0; d_got[i] = 0; d_done[i] = false;
     if
     :: life != d_life_of_p[i] -> pull[i] = IDLE; failed(i)
     :: life == d_life_of_p[i] -> pull[i] = ATTACHING; to_source(i, M_ATTACH, a, offered)
     :: budget && refusals -> budget--; refusals--; costly = true; pull[i] = IDLE; failed(i)
     fi
#ifndef NO_FENCE
  :: else
#endif
  fi
}

inline admit(i) {
  if
  :: d_kv[2 * i] && d_kv[2 * i + 1]
  :: else -> unverified = true
  fi;
  d_running[i] = true; d_position[i] = d_base[i] + 1
}

inline blocks_ready(i, e, n) {
  if
  :: pull[i] == ATTACHING || pull[i] == OFFERED || pull[i] == PULLING ->
     if
     :: d_epoch[i] != 0 && d_epoch[i] != e && pull[i] == PULLING -> abandon(i); failed(i)
     :: else ->
        if
        :: d_epoch[i] != e -> d_epoch[i] = e; d_known[i] = 0; d_done[i] = false
        :: else
        fi;
        d_known[i] = (n > d_known[i] -> n : d_known[i]);
        if
        :: pull[i] == ATTACHING -> PULL_TO(i, ATTACHING, OFFERED)
        :: else
        fi
     fi
  :: else
  fi
}

inline hear_source(i) {
  if
  :: p2d[i]?M_READY(a, x, y) ->
     if
     :: a == d_attempt[i] -> blocks_ready(i, x, y)
     :: else
     fi
  :: p2d[i]?M_DONE(a, x, _) ->
     if
     :: a == d_attempt[i] && (pull[i] == OFFERED || pull[i] == PULLING) ->
        if
        :: x == d_epoch[i] -> d_done[i] = true
        :: else -> abandon(i); failed(i)
        fi
     :: else
     fi
  :: p2d[i]?M_SETTLED(a, x, y) ->
     if
     :: a == d_attempt[i] && pull[i] == SETTLING && x == d_epoch[i] ->
        if
        :: y -> PULL_TO(i, SETTLING, SETTLED); admit(i)
        :: else -> abandon(i); failed(i)
        fi
     :: else
     fi
  :: p2d[i]?M_WITHDRAWN(a, _, _) ->
     if
     :: a == d_attempt[i] && PULLS(i) -> abandon(i); failed(i)
     :: else
     fi
  :: p2d[i]?M_WELCOME(_, _, _) ->
     d_torn[i] = false; d_asked[i] = false;
     if
     :: PULLS(i) -> to_source(i, M_ATTACH, d_attempt[i], d_offered[i])
     :: else
     fi;
     if
     :: pull[i] == SETTLING -> to_source(i, M_SETTLE, d_attempt[i], d_epoch[i])
     :: else
     fi
  fi;
  a = 0; x = 0; y = 0
}

inline end_read(i) {
  d_reading[i] = false;
  if
  :: d_source[i] == p_life -> d_kv[2 * i + d_got[i]] = p_kv[d_got[i]]; d_got[i]++
  :: else -> abandon(i); failed(i)
  fi
}

/* A read that nobody waits for any more has ended: only now are its blocks free. */
inline end_late_read(i) {
  if
  :: d_late_source[i] == p_life -> d_kv[2 * i + d_late_block[i]] = p_kv[d_late_block[i]]
  :: else
  fi;
  if
  :: own[i] != QUARANTINED -> two_owners = true
  :: else -> own[i] = FREE
  fi;
  to_source(i, M_DETACH, d_late[i], 0);
  d_late[i] = 0; d_late_source[i] = 0; d_late_block[i] = 0
}

inline end_decode_step(i) {
  d_stepping[i] = false;
  if
  :: d_step_generation[i] != d_generation[i] || own[i] == FREE -> two_owners = true
  :: else
  fi;
  if
  :: own[i] == LIMBO -> own[i] = FREE
  :: else
  fi;
  if
  :: d_running[i] && d_step_generation[i] == d_generation[i] ->
     d_position[i]++;
     if
     :: d_position[i] >= LAST -> d_running[i] = false; own[i] = FREE; x = 1
     :: else -> x = 0
     fi;
     if
     :: !d_lost_at_g[i] -> d2g[i]!M_TOKENS(d_attempt[i], d_position[i], x)
     :: else
     fi
  :: else
  fi;
  x = 0
}

proctype Decode(byte i) {
  byte a, x, y;
end:
  do
  :: atomic { g2d[i]?M_DECODE(a, x, y) -> decode(i, a, x / 4, x % 4, y); a = 0; x = 0; y = 0 }
  :: atomic { g2d[i]?M_ABORT(a, _, _) ->
       if
       :: d_attempt[i] <= a -> forget(i)
       :: else
       fi;
       a = 0 }
  :: atomic { nempty(p2d[i]) -> hear_source(i) }
  :: atomic { pull[i] == OFFERED && own[i] == FREE ->
       own[i] = HELD; d_generation[i]++; d_kv[2 * i] = false; d_kv[2 * i + 1] = false;
       PULL_TO(i, OFFERED, PULLING) }
  :: atomic { pull[i] == PULLING && !d_reading[i] && !d_got[i] && budget && revocations ->
       budget--; revocations--;
       own[i] = FREE;
       PULL_TO(i, PULLING, OFFERED) }
  :: atomic { pull[i] == PULLING && !d_reading[i] && d_got[i] < d_known[i] -> d_reading[i] = true }
  :: atomic { d_reading[i] -> end_read(i) }
  :: atomic { d_late[i] -> end_late_read(i) }
  :: atomic { pull[i] == PULLING && d_done[i] && d_got[i] == 2 ->
       PULL_TO(i, PULLING, SETTLING);
       to_source(i, M_SETTLE, d_attempt[i], d_epoch[i]);
#ifdef NO_SETTLE
       PULL_TO(i, SETTLING, SETTLED);
       admit(i)
#endif
     }
  :: atomic { d_running[i] && !d_stepping[i] -> d_stepping[i] = true; d_step_generation[i] = d_generation[i] }
  :: atomic { d_stepping[i] -> end_decode_step(i) }
  :: atomic { d_torn[i] && !d_asked[i] && !lost_at_d[i] ->
       d_asked[i] = true;
       a = (PULLS(i) -> d_attempt[i] : d_late[i]);
       to_source(i, M_HELLO, a, 0);
       a = 0 }
  :: atomic { lost_at_d[i] ->                          /* it notices that the source has crashed */
       lost_at_d[i] = false; d_torn[i] = false; d_asked[i] = false;
       d_life_of_p[i] = p_life;
       if
       :: PULLS(i) && d_source[i] != p_life -> abandon(i); failed(i)
       :: else
       fi }
  od
}

/* --- the gateway ------------------------------------------------------------------------------------------------- */

inline send_decode() {
  to_d(g_d, M_DECODE, g_attempt, 4 * g_offer + g_base, g_life_of_p);
  if
  :: budget && replays && !replay_attempt ->
     budget--; replays--;
     replay_attempt = g_attempt; replay_offer = g_offer; replay_d = g_d; replay_base = g_base
  :: true
  fi
}

inline begin() {
  g_attempt++; g_offer = g_attempt; g_base = g_next; g_spoken = false;
  to_p(M_PREFILL, g_attempt, 0);
  send_decode()
}

inline end_with(why) {
  g_over = true; terminals++;
  to_p(M_ABORT, g_attempt, 0);
  to_d(g_d, M_ABORT, g_attempt, 0, 0)
}

inline retry() {
  to_p(M_ABORT, g_attempt, 0);
  to_d(g_d, M_ABORT, g_attempt, 0, 0);
  if
  :: g_attempt < ATTEMPTS -> g_d = 1 - g_d; begin()
  :: else -> g_over = true; terminals++
  fi
}

/* The decode worker is gone before it began: the offer still stands, for the other one. */
inline rebind() {
  if
  :: g_attempt < ATTEMPTS -> g_attempt++; g_d = 1 - g_d; send_decode()
  :: else -> end_with(0)
  fi
}

proctype Gateway() {
  byte a, x, y, i;
  atomic { begin() };
end:
  do
  :: atomic { p2g?M_TOKENS(a, _, _) ->
       if
       :: !g_over && a == g_offer && g_next == g_base -> g_next++
       :: else
       fi;
       a = 0 }
  :: atomic { p2g?M_FAILED(a, _, _) ->
       if
       :: !g_over && a == g_offer -> retry()
       :: else
       fi;
       a = 0 }
  :: atomic { nempty(d2g[0]) || nempty(d2g[1]) ->
       if
       :: nempty(d2g[0]) -> i = 0
       :: nempty(d2g[1]) -> i = 1
       fi;
       if
       :: d2g[i]?M_TOKENS(a, x, y) ->
          if
          :: !g_over && i == g_d && a == g_attempt ->
             g_spoken = true;
             g_next = (x > g_next -> x : g_next);
             if
             :: y -> g_over = true; terminals++
             :: else
             fi
          :: else
          fi
       :: d2g[i]?M_FAILED(a, _, _) ->
          if
          :: !g_over && i == g_d && a == g_attempt -> retry()
          :: else
          fi
       fi;
       a = 0; x = 0; y = 0; i = 0 }
  :: atomic { lost_at_g ->                             /* it notices that the prefill worker has crashed */
       lost_at_g = false; g_life_of_p = p_life;
       if
       :: !g_over && !g_spoken && g_next == g_base -> retry()
       :: else
       fi }
  :: atomic { d_lost_at_g[0] || d_lost_at_g[1] ->      /* or a decode worker */
       i = (d_lost_at_g[0] -> 0 : 1);
       d_lost_at_g[i] = false;
       if
       :: !g_over && i == g_d && g_spoken -> retry()
       :: !g_over && i == g_d && !g_spoken -> rebind()
       :: else
       fi;
       i = 0 }
  :: atomic { !g_over && budget && aborts -> budget--; aborts--; costly = true; end_with(0) }
  od
}

/* --- what may go wrong, and time --------------------------------------------------------------------------------- */

inline flush(channel) {
  do
  :: len(channel) > 0 -> channel?_(_, _, _)
  :: len(channel) == 0 -> break
  od
}

inline crash_p() {
  p_life++; p_newest = 0; p_owner = 0; p_waiting = false; p_computing = false; p_pinned = false; p_step = false;
  p_kv[0] = false; p_kv[1] = false; p_generation = 0; p_ready = 0; p_ended = 0;
  lease = L_NONE; l_sink = NOBODY; l_opened = 0; l_attempt = 0;
  parked_sink = NOBODY; told_attempt = 0; told_epoch = 0; told_sink = NOBODY;
  flush(g2p); flush(p2g); flush(d2p[0]); flush(d2p[1]); flush(p2d[0]); flush(p2d[1]);
  lost_at_g = true; lost_at_d[0] = true; lost_at_d[1] = true
}

inline crash_d(i) {
  pull[i] = IDLE; own[i] = FREE; d_running[i] = false; d_stepping[i] = false; d_reading[i] = false; d_late[i] = 0;
  d_attempt[i] = 0; d_newest[i] = 0; d_torn[i] = false; d_asked[i] = false; d_generation[i] = 0;
  d_known[i] = 0; d_got[i] = 0; d_done[i] = false; d_epoch[i] = 0;
  flush(g2d[i]); flush(d2g[i]); flush(d2p[i]); flush(p2d[i]);
  lost_at_d[i] = false; d_life_of_p[i] = p_life;
  if
  :: replay_attempt && replay_d == i -> replay_attempt = 0
  :: else
  fi;
  said_hello(i, 0);                                    /* the source notices at once */
  if
  :: told_sink == i -> told_sink = NOBODY
  :: else
  fi;
  d_lost_at_g[i] = true
}

inline lose(channel, i) {
  nempty(channel) && budget && losses -> budget--; losses--;
  channel?_(_, _, _);
  d_torn[i] = true; d_asked[i] = false
}

/* Time is up for the lease. */
inline expire() {
#ifdef EARLY_REUSE
  p_pinned = false; p_wipe()
#else
  x = l_opened;
  p_computing = false;
  lease_end();
  if
  :: !lost_at_g -> p2g!M_FAILED(x, 0, 0)
  :: else
  fi;
  x = 0
#endif
}

#define CLEAN (P_FREE && !LEASE_HELD && !p_owner && parked_sink == NOBODY && own[0] == FREE && own[1] == FREE && \
  !PULLS(0) && !PULLS(1) && !d_running[0] && !d_running[1] && !d_late[0] && !d_late[1])

proctype Fate() {
  byte x;
end:
  do
  :: atomic { lose(d2p[0], 0) }
  :: atomic { lose(d2p[1], 1) }
  :: atomic { lose(p2d[0], 0) }
  :: atomic { lose(p2d[1], 1) }
  :: atomic { budget && crashes -> budget--; crashes--; costly = true; crash_p() }
  :: atomic { budget && crashes -> budget--; crashes--; costly = true; crash_d(0) }
  :: atomic { budget && crashes -> budget--; crashes--; costly = true; crash_d(1) }
  :: atomic { LEASE_HELD && p_pinned && budget && expiries -> budget--; expiries--; costly = true; expire() }
  :: atomic { replay_attempt && !d_lost_at_g[replay_d] ->
       g2d[replay_d]!M_DECODE(replay_attempt, 4 * replay_offer + replay_base, g_life_of_p); replay_attempt = 0 }
  :: atomic { timeout && !over ->                      /* nothing else goes on: what waits in vain has waited enough */
       if
       :: parked_sink != NOBODY -> to_sink(parked_sink, M_WITHDRAWN, parked_attempt, 0, 0); parked_sink = NOBODY
       :: parked_sink == NOBODY && lease == L_COMPLETE && l_sink == NOBODY -> expire()
       :: else -> over = true
       fi }
  od
}

init { atomic { run Gateway(); run Prefill(); run Decode(0); run Decode(1); run Fate() } }

/* --- the properties ---------------------------------------------------------------------------------------------- */

ltl verified { [] !unverified }
ltl one_owner { [] !two_owners }
ltl terminates { <> (over && terminals == 1) }
ltl no_leak { [] (over -> CLEAN) }
ltl no_waste { [] ((over && !costly) -> g_attempt == 1) }
