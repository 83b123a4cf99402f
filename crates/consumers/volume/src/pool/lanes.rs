//! The lanes of a volume: its connections to the donors, lent to one request at a time.
//!
//! A lane is taken by whoever serves a request and given back when nothing of that is under way any
//! more. The one that was given back last is taken first, so that there are as many as requests
//! overlap.

use hecaton_space::{Lane, Space, SpaceError};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Most lanes at a time; so many requests of a volume talk to donors at once. Each is a connection
/// to each donor, which takes 1024 of all its borrowers.
pub(crate) const MAX_LANES: usize = 16;

/// The same, of a volume for swap: a lane has 2 MiB for what each donor sends, which is locked.
pub(crate) const SWAP_LANES: usize = 4;

/// Most lanes beside those, which wait for donors that are away.
const MAX_DETACHED: usize = 16;

/// All lanes of a volume.
pub(crate) struct Lanes {
    space: Arc<Space>,
    most: usize,
    pool: Mutex<Pool>,
    changed: Condvar,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Lane>,
    /// Idle ones, and those that were lent.
    count: usize,
    detached: usize,
    /// Lanes of an earlier one are not lent again.
    generation: u64,
    /// Threads that wait for one.
    waiting: usize,
}

/// A lane on loan.
pub(crate) struct Lent {
    lanes: Arc<Lanes>,
    lane: Option<Lane>,
    is_detached: bool,
    generation: u64,
}

impl Lanes {
    pub(crate) fn new(space: Arc<Space>, most: usize) -> Arc<Lanes> {
        Arc::new(Lanes { space, most, pool: Mutex::default(), changed: Condvar::new() })
    }

    /// Lends a lane; waits until there is one.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Lent, SpaceError> {
        let mut pool = self.pool();
        let lane = loop {
            if let Some(lane) = pool.idle.pop() {
                break Some(lane);
            }
            if pool.count < self.most {
                pool.count += 1;
                break None;
            }
            pool.waiting += 1;
            pool = self.changed.wait(pool).expect("no thread panics with the lanes");
            pool.waiting -= 1;
        };
        let generation = pool.generation;
        drop(pool);
        // Gives the place back, if there is no lane for it.
        let mut lent = Lent { lanes: Arc::clone(self), lane, is_detached: false, generation };
        if lent.lane.is_none() {
            lent.lane = Some(self.space.lane()?);
        }
        Ok(lent)
    }

    /// Whether somebody waits for one.
    pub(crate) fn are_waited_for(&self) -> bool {
        self.pool().waiting > 0
    }

    /// Lends a lane, if there is one that nobody has.
    pub(crate) fn try_take(self: &Arc<Self>) -> Option<Lent> {
        let mut pool = self.pool();
        let (lane, generation) = (pool.idle.pop()?, pool.generation);
        Some(Lent { lanes: Arc::clone(self), lane: Some(lane), is_detached: false, generation })
    }

    /// Lends no lane again that there is now: donors are to be connected to anew.
    pub(crate) fn begin_anew(&self) {
        let mut pool = self.pool();
        pool.generation += 1;
        pool.count -= pool.idle.len();
        let idle = std::mem::take(&mut pool.idle);
        pool.wake_one(&self.changed);
        drop(pool);
        drop(idle);
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().expect("no thread panics with the lanes")
    }
}

impl Pool {
    /// To wake nobody is a system call, too.
    fn wake_one(&self, changed: &Condvar) {
        if self.waiting > 0 {
            changed.notify_one();
        }
    }
}

impl Lent {
    /// Lets others have a lane in place of this one, which its holder keeps for long. False if
    /// there are too many of those.
    pub(crate) fn detach(&mut self) -> bool {
        let mut pool = self.lanes.pool();
        if self.is_detached || pool.detached >= MAX_DETACHED {
            return self.is_detached;
        }
        pool.count -= 1;
        pool.detached += 1;
        self.is_detached = true;
        pool.wake_one(&self.lanes.changed);
        true
    }
}

impl Deref for Lent {
    type Target = Lane;

    fn deref(&self) -> &Lane {
        self.lane.as_ref().expect("it is there until the drop")
    }
}

impl DerefMut for Lent {
    fn deref_mut(&mut self) -> &mut Lane {
        self.lane.as_mut().expect("it is there until the drop")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let lane = self.lane.take();
        debug_assert!(lane.as_ref().is_none_or(|lane| lane.in_flight() == 0));
        let mut pool = self.lanes.pool();
        match (self.is_detached, lane) {
            (false, Some(lane)) if pool.generation == self.generation => pool.idle.push(lane),
            (false, _) => pool.count -= 1,
            (true, _) => pool.detached -= 1,
        }
        pool.wake_one(&self.lanes.changed);
    }
}
