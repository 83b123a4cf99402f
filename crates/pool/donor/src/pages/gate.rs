//! What a page request must pass: one gate for each space.
//!
//! Every request for pages asks three things: is the space that node's, is the connection's epoch still served, and
//! where is the extent? The table knows, but behind the one lock of all connections. The gate holds the same
//! answers for one space behind a lock of its own, which requests take shared and only a change of
//! the space's extents or fence takes alone. Borrowers do not meet each other here at all, and the
//! threads of one borrower meet at one atomic counter.
//!
//! Two dangers, and what stands against each:
//!
//! - *A write that lands late*: after a fence was answered, or in an extent that was freed and given
//!   to another space. A write holds the gate shared from the check until its last byte is in the
//!   arena ([`Gate::enter`]), and both a fence and a free must have the gate alone. Verifying the
//!   checksums comes before that, and no socket is touched in between: the lock is held for a copy.
//! - *A read that sends another space's pages.* A read may sit in its socket for seconds, so that it
//!   cannot hold the gate. It holds the extent
//!   ([`Pinned`](crate::lender::Pinned)): a freed extent's pages go back to the
//!   allocator only when the last of its reads is done.
//!
//! Alternatives that were rejected: a cache in each connection with a generation to compare leaves
//! the time between comparison and copy open; epoch-based reclamation would make fences and frees
//! wait for all connections instead of one space's.
//!
//! Invariant: gates change only under the table's lock, together with it. Order of locks: table,
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
    /// How many of the space's extents are wanted back, for answers that do not ask the table.
    pub(crate) recalled: AtomicU32,
}

/// What the gate lets through.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) fence: Epoch,
    pub(crate) ownership: Ownership,
    pub(crate) extents: HashMap<ExtentId, Arc<View>>,
}

/// An extent, as those have it who came to it in a certain time. Where its pages are may change while
/// it is read. Then the gate has another view from there on, and when nobody has the one before any
/// more, nobody can be reading what was at the old place.
///
/// It costs readers nothing, who hold the extent anyhow. A count of readers would, and a lock that they
/// hold would be held for as long as they sit in their sockets.
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

/// An extent in use. The last one to let go of it reclaims its pages.
#[derive(Debug)]
pub(crate) struct Extent {
    pub(crate) lent: LentExtent,
    pub(crate) standing: Standing,
    /// Writes take it shared, a discard alone: else a discard that has forgotten a page's sum and
    /// is about to punch its memory would take a write's contents in between, and not its sum. A
    /// fill takes it alone too, from its look at a page to the store.
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

    /// Passes a request. While the guard lives, no extent of the space goes, no fence rises, and the space
    /// does not become another node's.
    pub(crate) fn enter(
        &self,
        (node, epoch): (Option<NodeDigest>, Epoch),
        now_ms: u64,
    ) -> Result<RwLockReadGuard<'_, Open>, Refusal> {
        let open = self.look();
        open.ownership.check(node)?;
        self.pass(open, epoch, now_ms)
    }

    /// The same for a request that reads pages. Of one that only may read, it is no sign of life of the space's owner.
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
        // A hot space's threads would else pass this word from core to core on every request.
        const GRAIN_MS: u64 = 64;
        if now_ms >= self.heard_ms.load(Ordering::Relaxed) + GRAIN_MS {
            self.heard_ms.fetch_max(now_ms, Ordering::Relaxed);
        }
        Ok(open)
    }

    /// What the gate lets through, for who is no borrower.
    pub(crate) fn look(&self) -> RwLockReadGuard<'_, Open> {
        self.open.read().expect("no thread panics in a gate")
    }

    /// Changes what the gate lets through, when all who are inside have left.
    pub(crate) fn change(&self) -> RwLockWriteGuard<'_, Open> {
        self.open.write().expect("no thread panics in a gate")
    }

    /// When the last request passed, give or take a tenth of a second.
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
