//! Doorbells: which queues and state tables changed since the worker last told the world. Writers mark at commit and never call NOTIFY, whose cluster-wide
//! lock would make their commits go one at a time; the worker sends one coalesced notification per name.

use super::{Instance, Lock};
use crate::xact::Pending;
use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicU64, Ordering};

const BELLS: usize = 4096;
/// How far from its home place a bell may stand before the table counts as full.
const PROBES: usize = 64;

/// What a doorbell belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Kind {
    /// A queue, by its number; channel `stint_queue`.
    Queue = 1,
    /// A state table, by its oid; channel `stint_changes`.
    Changes = 2,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Bell {
    instance: Instance,
    kind: u32,
    object: u32,
}

/// In shared memory, guarded by [`Lock::Bells`].
#[repr(C)]
pub struct Shared {
    /// How often bells were taken, by whichever worker; read without the lock, too.
    takes: AtomicU64,
    /// A place with kind 0 is free.
    bells: UnsafeCell<[Bell; BELLS]>,
}

// SAFETY: touched only under Lock::Bells.
unsafe impl Sync for Shared {}

/// A bell this transaction will ring.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Ring {
    instance: Instance,
    kind: Kind,
    object: u32,
}

thread_local! {
    /// The bells to ring at commit.
    pub static PENDING: Pending<Ring> = const { Pending::new() };
    /// The bell that this session found rung or rang last, and how often bells had been taken then: as long as they are not taken again it is still rung, and
    /// whoever takes it does so after this commit. So who commits over and over does without the lock.
    static RUNG: Cell<Option<(Ring, u64)>> = const { Cell::new(None) };
}

/// Rings when this transaction commits. Asking twice rings once.
pub fn ring(instance: Instance, kind: Kind, object: u32) {
    let ring = Ring { instance, kind, object };
    PENDING.with(|p| {
        // A rolled-back savepoint takes its own entry with it, so only an entry of this very subtransaction could stand for this one; a second is harmless.
        if !p.any_here(|r| *r == ring) {
            p.push(ring);
        }
    });
}

fn place(ring: &Ring) -> usize {
    let mixed = u64::from(ring.instance.database) << 32 | u64::from(ring.object);
    (mixed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize ^ ring.kind as usize
}

/// At commit: marks the bell. A table too full to hold it loses the doorbell, never the change: clients also poll.
pub fn commit(ring: &Ring) {
    let Some(shared) = super::get() else { return };
    if RUNG.get().is_some_and(|(rung, takes)| rung == *ring && takes == shared.bells.takes.load(Ordering::SeqCst)) {
        return;
    }
    let _held = super::lock(Lock::Bells);
    let takes = shared.bells.takes.load(Ordering::Relaxed);
    // SAFETY: the lock is held.
    let bells = unsafe { &mut *shared.bells.bells.get() };
    let home = place(ring);
    for step in 0..PROBES {
        let bell = &mut bells[(home + step) % BELLS];
        let same = bell.kind == ring.kind as u32 && bell.object == ring.object && bell.instance == ring.instance;
        if same {
            RUNG.set(Some((*ring, takes)));
            return; // rung already: the worker is awake
        }
        if bell.kind == 0 {
            *bell = Bell { instance: ring.instance, kind: ring.kind as u32, object: ring.object };
            RUNG.set(Some((*ring, takes)));
            break;
        }
    }
    super::workers::wake(shared, ring.instance.database);
}

/// Takes the rung bells of one instance: for the worker. The places become free, also those an earlier instance in this database left.
pub fn take(shared: &super::Shared, instance: Instance) -> Vec<(Kind, u32)> {
    let mut rung = Vec::with_capacity(BELLS);
    let _held = super::lock(Lock::Bells);
    shared.bells.takes.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the lock is held; the vector has room, so nothing allocates under it.
    let bells = unsafe { &mut *shared.bells.bells.get() };
    for bell in bells.iter_mut().filter(|bell| bell.kind != 0 && bell.instance.database == instance.database) {
        if bell.instance == instance {
            rung.push((if bell.kind == Kind::Queue as u32 { Kind::Queue } else { Kind::Changes }, bell.object));
        }
        bell.kind = 0;
    }
    rung
}
