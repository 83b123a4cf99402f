//! Checks node, epoch and extent of each page request of a space.
//!
//! Every page request asks three questions: does the space belong to the node, does the donor still
//! serve the connection's epoch, and where is the extent? The table knows, but behind the one lock
//! of all connections. The gate holds the same answers for one space behind its own lock. Requests
//! take this lock shared; only a change of the space's extents, fence or owner takes it alone.
//! Borrowers do not contend with each other here, and the threads of one borrower contend for one
//! atomic counter.
//!
//! Two dangers, and the protection against each:
//!
//! - *A write that lands late*: after the donor answered a fence, or in an extent that was freed
//!   and given to another space. A write holds the gate shared from the check until its last byte
//!   is in the arena ([`Gate::enter`]); a fence and a free must hold the gate alone. Checksums are
//!   verified before, and no socket is touched in between: the lock is held for a copy.
//! - *A read that sends another space's pages*: a read may sit in its socket for seconds, so it
//!   cannot hold the gate. It holds the extent ([`Pinned`](crate::lender::Pinned)): a freed
//!   extent's pages return to the allocator only when its last read is done.
//!
//! Rejected: a cache in each connection with a generation to compare leaves the time between
//! comparison and copy open. Epoch-based reclamation would make fences and frees wait for all
//! connections instead of one space's.
//!
//! Invariant: gates change only under the table's lock, together with the table. Lock order: table,
//! gate, [`Extent::contents`].

use crate::extents::owner::{NodeDigest, Ownership};
use crate::extents::standing::Standing;
use crate::extents::table::{LentExtent, check_epoch};
use crate::parking::park::Parking;
use hecaton_memory::{Epoch, ExtentId};
use hecaton_transport::protocol::Refusal;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[derive(Debug)]
pub(crate) struct Gate {
    open: RwLock<Open>,
    /// When the last request passed, in milliseconds of the donor's clock.
    heard_ms: AtomicU64,
    /// Recalled extents of the space, for answers that do not ask the table.
    pub(crate) recalled: AtomicU32,
}

/// State against which the gate checks requests.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) fence: Epoch,
    pub(crate) ownership: Ownership,
    pub(crate) extents: HashMap<ExtentId, Arc<View>>,
}

/// An extent as its readers of one period hold it. The place of its pages may change during a read.
/// The gate then hands out a new view. Once no reader holds the old view, no read of the old place
/// is in progress.
///
/// Readers hold the extent anyhow, so a view costs them nothing. A count of readers would cost
/// them, and a lock would be held for as long as readers sit in their sockets.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) extent: Arc<Extent>,
}

impl Deref for View {
    type Target = Extent;

    fn deref(&self) -> &Extent {
        &self.extent
    }
}

/// An extent in use. Its last holder reclaims its pages.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) lent: LentExtent,
    pub(crate) standing: Standing,
    /// Writes take it shared, a discard alone. Otherwise a write between a discard's erasure of a
    /// sum and its punch of the memory would lose its contents but not its sum. A fill takes it
    /// alone too, from its look at a page to the store.
    pub(crate) contents: RwLock<()>,
    pub(crate) parking: Parking,
}

impl View {
    /// The first view of an extent.
    pub(crate) fn first(lent: LentExtent, standing: Standing, parking: Parking) -> Arc<View> {
        let extent = Extent { lent, standing, contents: RwLock::new(()), parking };
        Arc::new(View { extent: Arc::new(extent) })
    }
}

impl Gate {
    pub(crate) fn new(fence: Epoch, heard_ms: u64, owner: Option<NodeDigest>) -> Gate {
        let open = Open { fence, ownership: Ownership::new(owner), extents: HashMap::new() };
        let (open, heard_ms) = (RwLock::new(open), AtomicU64::new(heard_ms));
        Gate { open, heard_ms, recalled: AtomicU32::new(0) }
    }

    /// Checks a request. While the guard lives, no extent of the space is freed, its fence does not
    /// rise, and its owner does not change.
    pub(crate) fn enter(
        &self,
        (node, epoch): (Option<NodeDigest>, Epoch),
        now_ms: u64,
    ) -> Result<RwLockReadGuard<'_, Open>, Refusal> {
        let open = self.look();
        open.ownership.check(node)?;
        self.pass(open, epoch, now_ms)
    }

    /// Checks a read. A read by a node that may only read is no sign of life of the owner.
    pub(crate) fn enter_to_read(
        &self,
        (node, epoch): (Option<NodeDigest>, Epoch),
        now_ms: u64,
    ) -> Result<RwLockReadGuard<'_, Open>, Refusal> {
        let open = self.look();
        if open.ownership.check(node).is_ok() {
            return self.pass(open, epoch, now_ms);
        }
        open.ownership.check_reader(node)?;
        check_epoch(open.fence, epoch)?;
        Ok(open)
    }

    fn pass<'a>(
        &self,
        open: RwLockReadGuard<'a, Open>,
        epoch: Epoch,
        now_ms: u64,
    ) -> Result<RwLockReadGuard<'a, Open>, Refusal> {
        check_epoch(open.fence, epoch)?;
        // Otherwise every request of a hot space would move this word from core to core.
        const GRAIN_MS: u64 = 64;
        if now_ms >= self.heard_ms.load(Ordering::Relaxed) + GRAIN_MS {
            self.heard_ms.fetch_max(now_ms, Ordering::Relaxed);
        }
        Ok(open)
    }

    /// Locks the gate shared without a check, for callers other than borrowers.
    pub(crate) fn look(&self) -> RwLockReadGuard<'_, Open> {
        self.open.read().expect("no thread panics in a gate")
    }

    /// Locks the gate alone, once all requests inside have left.
    pub(crate) fn change(&self) -> RwLockWriteGuard<'_, Open> {
        self.open.write().expect("no thread panics in a gate")
    }

    /// Time of the last request that passed, to within 0.1 s.
    pub(crate) fn heard_ms(&self) -> u64 {
        self.heard_ms.load(Ordering::Relaxed)
    }
}

impl Open {
    pub(crate) fn extent(&self, extent: ExtentId) -> Result<&Arc<View>, Refusal> {
        self.extents.get(&extent).ok_or(Refusal::NoSuchExtent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_transport::protocol::OWNERS_SINCE;

    #[test]
    fn who_only_may_read_does_not_keep_the_space_of_a_silent_owner() {
        let [owner, reader] = ["a", "b"].map(NodeDigest::of);
        let (gate, epoch) = (Gate::new(Epoch(1), 0, Some(owner)), Epoch(1));
        assert!(!gate.change().ownership.fenced(owner, OWNERS_SINCE));
        gate.change().ownership.admit(reader).expect("there is room");
        assert!(gate.enter_to_read((Some(reader), epoch), 5_000).is_ok());
        assert!(
            gate.enter_to_read((Some(reader), Epoch(0)), 5_000).is_err(),
            "of an earlier epoch"
        );
        assert_eq!(gate.heard_ms(), 0);
        assert!(gate.enter_to_read((Some(owner), epoch), 6_000).is_ok());
        assert_eq!(gate.heard_ms(), 6_000);
    }
}
