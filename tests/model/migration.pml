/* The live migration of a running sequence as a model for SPIN: a gateway, the old worker (source), the new one (sink).
 *
 * The old worker generates tokens, one a step; a step writes the KV of the token before. The new worker attaches; when
 * the step in flight has ended the old one stops, tells the gateway where (the cut), and offers its blocks under a
 * lease. The new one reads, settles, and goes on at the cut. A worker crashes, the lease expires, a message between the
 * workers is lost, a read fails, the client leaves. Where the sequence is then nobody's, a new attempt would begin from
 * what the client has; here, the request ends.
 *
 * The KV of the sequence is its number of tokens that have KV; 0 is that of nobody knows whom.
 */

#ifndef DISTURBANCES
#define DISTURBANCES 3
#endif
#define START 1         /* tokens that the client has in the beginning */
#define LAST 5          /* tokens, with which the sequence ends */

mtype:lease = { L_NONE, L_OPEN, L_COMPLETE, L_SETTLED, L_ENDED };
mtype:pull = { ATTACHING, PULLING, SETTLING, SETTLED, ABANDONED };
mtype:msg = { M_TOKEN, M_CUT, M_MOVED, M_FAILED, M_FINISHED, M_ABORT, M_ATTACH, M_SETTLE, M_DETACH, M_OFFER, M_SETTLED,
  M_WITHDRAWN };

chan old2g = [8] of { mtype:msg, byte };
chan new2g = [8] of { mtype:msg, byte };
chan g2old = [4] of { mtype:msg, byte };
chan g2new = [4] of { mtype:msg, byte };
chan new2old = [8] of { mtype:msg, byte };
chan old2new = [8] of { mtype:msg, byte };

bool unverified, two_owners, twice, gap, over;
byte terminals;
byte budget = DISTURBANCES;

/* The old worker: its tokens, the KV in its blocks, the lease. */
bool o_running = true, o_step, o_wanted, o_alive = true, o_held = true, o_told;
byte o_tokens = START, o_kv = START - 1;
mtype:lease lease = L_NONE;

/* The new worker. */
mtype:pull pull = ATTACHING;
bool n_running, n_step, n_reading, n_held = true, n_alive = true, torn;
byte n_tokens, n_kv, n_cut;

/* The gateway: tokens that the client has. */
byte g_next = START;
bool g_over, g_cut;

inline LEASE_TO(from, to) { assert(lease == from); lease = to }

#define O_FREE (!o_held && !o_step)
#define N_FREE (!n_held && !n_step && !n_reading)

/* What is free is soon somebody else's. */
inline o_wipe() { if :: O_FREE -> o_kv = 0 :: else fi }
inline to_new(kind, what) { if :: n_alive -> old2new!kind(what) :: else fi }
inline to_old(kind, what) { if :: o_alive -> new2old!kind(what) :: else fi }

inline lease_ends() {
  if
  :: lease == L_OPEN -> LEASE_TO(L_OPEN, L_ENDED)
  :: lease == L_COMPLETE -> LEASE_TO(L_COMPLETE, L_ENDED)
  :: else
  fi;
  o_held = false; o_wipe()
}

/* The sequence stops here: what it is now is offered. */
inline cut() {
  o_wanted = false;
#ifndef NO_CUT
  o_running = false;
#endif
  old2g!M_CUT(o_tokens);
  lease = L_OPEN;
  LEASE_TO(L_OPEN, L_COMPLETE);
  to_new(M_OFFER, o_tokens)
}

proctype Old() {
  byte x;
end:
  do
  :: atomic { o_alive && o_running && !o_step && o_tokens < LAST -> o_step = true }
  :: atomic { o_step ->                               /* the device has written the KV of the last token */
       if
       :: O_FREE -> two_owners = true
       :: else
       fi;
       o_step = false;
       if
       :: o_kv != 0 || o_tokens == 1 -> o_kv = o_tokens
       :: else
       fi;
       if
       :: o_running && o_alive ->
          o_tokens++; old2g!M_TOKEN(o_tokens);
          if
          :: o_tokens == LAST -> o_running = false; old2g!M_FINISHED(0);
             if
             :: lease == L_COMPLETE
             :: else -> o_held = false
             fi
          :: else
          fi
       :: else
       fi;
       if
       :: o_wanted && o_running -> cut()
       :: o_wanted && !o_running -> o_wanted = false; to_new(M_WITHDRAWN, 0)
       :: else
       fi;
       o_wipe() }
  :: atomic { new2old?M_ATTACH(_) ->
       if
       :: lease == L_COMPLETE -> to_new(M_OFFER, o_tokens)
       :: lease == L_SETTLED                           /* its Settle follows */
       :: else ->
          if
#ifdef NO_DRAIN
          :: o_running -> cut()
#else
          :: o_running && o_step -> o_wanted = true
          :: o_running && !o_step -> cut()
#endif
          :: !o_running -> to_new(M_WITHDRAWN, 0)
          fi
       fi }
  :: atomic { new2old?M_SETTLE(_) ->
       if
       :: lease == L_COMPLETE ->
          LEASE_TO(L_COMPLETE, L_SETTLED);
          o_held = false; o_wipe();
          to_new(M_SETTLED, 1); old2g!M_MOVED(0)
       :: lease == L_SETTLED -> to_new(M_SETTLED, 1)
       :: else -> to_new(M_SETTLED, 0)
       fi }
  :: atomic { new2old?M_DETACH(_) ->
       o_wanted = false;
       if
       :: lease == L_COMPLETE -> lease_ends(); old2g!M_FAILED(0)
       :: else
       fi }
  :: atomic { g2old?M_ABORT(_) ->
       o_running = false; o_wanted = false;
       if
       :: lease == L_COMPLETE -> to_new(M_WITHDRAWN, 0); lease_ends()
       :: else -> o_held = false; o_wipe()
       fi }
  :: atomic { lease == L_COMPLETE && budget -> budget--;      /* its time is up */
#ifdef EARLY_REUSE
       o_held = false; o_wipe()
#else
       to_new(M_WITHDRAWN, 0); lease_ends(); old2g!M_FAILED(0)
#endif
     }
  od
}

inline abandon() {
  pull = ABANDONED;
  if
  :: !n_reading -> n_held = false; to_old(M_DETACH, 0)
  :: else
  fi;
  new2g!M_FAILED(0)
}

inline go_on() {
  if
  :: n_kv == n_cut - 1
  :: else -> unverified = true
  fi;
  n_running = true; n_tokens = n_cut
}

proctype New() {
  byte x;
  atomic { to_old(M_ATTACH, 0) };
end:
  do
  :: atomic { old2new?M_OFFER(x) ->
       if
       :: pull == ATTACHING -> pull = PULLING; n_cut = x; n_reading = true
       :: else
       fi;
       x = 0 }
  :: atomic { n_reading ->
       n_reading = false;
       if
       :: pull == ABANDONED -> n_held = false; to_old(M_DETACH, 0)
       :: pull == PULLING && !o_alive -> abandon()
       :: pull == PULLING && o_alive && budget -> budget--; abandon()      /* the read fails */
       :: pull == PULLING && o_alive ->
          n_kv = o_kv; pull = SETTLING; to_old(M_SETTLE, 0);
#ifdef NO_SETTLE
          pull = SETTLED; go_on()
#endif
       fi }
  :: atomic { old2new?M_SETTLED(x) ->
       if
       :: pull == SETTLING && x -> pull = SETTLED; go_on()
       :: pull == SETTLING && !x -> abandon()
       :: else
       fi;
       x = 0 }
  :: atomic { old2new?M_WITHDRAWN(_) ->
       if
       :: pull == ATTACHING || pull == PULLING || pull == SETTLING -> abandon()
       :: else
       fi }
  :: atomic { torn -> torn = false;                    /* Hello: attach again, settle again */
       if
       :: pull == ATTACHING || pull == PULLING -> to_old(M_ATTACH, 0)
       :: pull == SETTLING -> to_old(M_ATTACH, 0); to_old(M_SETTLE, 0)
       :: else
       fi }
  :: atomic { !o_alive && (pull == ATTACHING || pull == SETTLING) && empty(old2new) -> abandon() }
  :: atomic { n_alive && n_running && !n_step -> n_step = true }
  :: atomic { n_step ->
       n_step = false;
       if
       :: n_running && n_alive ->
          n_tokens++; new2g!M_TOKEN(n_tokens);
          if
          :: n_tokens >= LAST -> n_running = false; n_held = false; new2g!M_FINISHED(0)
          :: else
          fi
       :: else
       fi }
  :: atomic { g2new?M_ABORT(_) ->
       if
       :: pull == ATTACHING || pull == PULLING || pull == SETTLING -> abandon()
       :: else
       fi;
       if
       :: n_running -> n_running = false; n_held = false
       :: else
       fi }
  od
}

inline end_all() {
  g_over = true; terminals++;
  if
  :: o_alive -> g2old!M_ABORT(0)
  :: else
  fi;
  if
  :: n_alive -> g2new!M_ABORT(0)
  :: else
  fi
}

/* Tokens are taken by position; the new worker's first frame brings everything from where the gateway stood. */
inline take(x) {
  if
  :: !g_over && x == g_next + 1 -> g_next = x
  :: !g_over && x > g_next + 1 -> gap = true; g_next = x
  :: else
  fi
}

proctype Gateway() {
  byte x;
  bool old_failed, new_failed;
end:
  do
  :: atomic { old2g?M_TOKEN(x) ->
       if
       :: g_cut && !g_over -> twice = true             /* nothing comes from the old one after its cut */
       :: else -> take(x)
       fi;
       x = 0 }
  :: atomic { old2g?M_CUT(_) -> g_cut = true }
  :: atomic { old2g?M_MOVED(_) -> g_cut = true }
  :: atomic { old2g?M_FINISHED(_) ->
       if
       :: !g_over && g_next == LAST -> end_all()
       :: else
       fi }
  :: atomic { old2g?M_FAILED(_) ->
       old_failed = true;
       if
       :: !g_over && new_failed -> end_all()
       :: else
       fi }
  :: atomic { new2g?M_TOKEN(x) ->
       g_next = (x > g_next && !g_over -> x : g_next); x = 0 }
  :: atomic { new2g?M_FINISHED(_) ->
       if
       :: !g_over -> end_all()
       :: else
       fi }
  :: atomic { new2g?M_FAILED(_) ->
       new_failed = true;
       if
       :: !g_over && (g_cut || old_failed || !o_alive) -> end_all()
       :: else
       fi }
  :: atomic { !o_alive && !g_over && (new_failed || !n_alive) -> end_all() }
  :: atomic { !n_alive && !g_over && (g_cut || old_failed) -> end_all() }
  :: atomic { g_cut && new_failed && !g_over -> end_all() }
  :: atomic { budget && !g_over -> budget--; end_all() }      /* the client leaves */
  od
}

inline flush(channel) {
  do
  :: len(channel) > 0 -> channel?_(_)
  :: len(channel) == 0 -> break
  od
}

proctype Fate() {
end:
  do
  :: atomic { budget && o_alive -> budget--;
       o_alive = false; o_running = false; o_step = false; o_wanted = false; o_held = false; o_kv = 0;
       if
       :: lease == L_COMPLETE -> LEASE_TO(L_COMPLETE, L_ENDED)
       :: else
       fi;
       flush(g2old); flush(new2old) }
  :: atomic { budget && n_alive -> budget--;
       n_alive = false; n_running = false; n_step = false; n_reading = false; n_held = false; pull = ABANDONED;
       torn = false;
       flush(g2new); flush(old2new); flush(new2old);
       if
       :: lease == L_COMPLETE && o_alive -> lease_ends(); old2g!M_FAILED(0)
       :: else -> o_wanted = false
       fi }
  :: atomic { len(new2old) > 0 && budget && n_alive -> budget--; new2old?_(_); torn = true }
  :: atomic { len(old2new) > 0 && budget && o_alive -> budget--; old2new?_(_); torn = true }
  :: atomic { timeout && !over -> over = true }
  od
}

init { atomic { run Gateway(); run Old(); run New(); run Fate() } }

ltl verified { [] !unverified }
ltl one_owner { [] !two_owners }
ltl one_generates { [] (!twice && !gap) }
ltl terminates { <> (over && terminals == 1) }
ltl no_leak { [] (over -> (O_FREE && N_FREE)) }
