//! Which resident page leaves next.
//!
//! # What an order can know
//!
//! The pager sees faults, not references: a resident page can be read a million times unseen. So
//! the pager tells an [`Order`] of installs, of the first write to a clean page, and of evicted
//! pages that come back. A page that is wanted again while it still lies in the pager's staging
//! cache comes back as [`Installed::Rescued`]. A later one comes back as [`Installed::Refault`]
//! with the number of evictions since its own. Only these two tell which pages were evicted
//! wrongly.
//!
//! # Protocol
//!
//! * The pager calls [`Order::installed`] for each page that it maps (a page put in staging is not
//!   mapped). It calls [`Order::referenced`] for a write-protect fault on a mapped page. It calls
//!   [`Order::removed`] when a mapped page goes away otherwise than as a victim (unmap, discard,
//!   remap). A page is in the order from `installed` until `removed` or until it is a victim.
//! * [`Order::victims`] gives up pages and asks the caller's `still` about each: false drops the
//!   page from the order silently. `still` is asked only about pages that are leaving, so it may
//!   also claim the page (resident → leaving) at once. A page that the caller could not evict after
//!   all is handed back with `installed(page, Installed::Rescued)`.
//! * `removed` for a page that is not in the order must not happen: removal is lazy, and the next
//!   entry of that page would be dropped in its place.
//!
//! # Memory
//!
//! Orders are queues of page keys of four bytes each, not linked lists: the default order takes 4
//! bytes for each page of local memory, and any but `random` at most [`MAX_BYTES_PER_PAGE`] while
//! pages are being removed (see `rings`).
//!
//! A page key is whatever 30-bit number the pager finds convenient; the upper two bits are used
//! here. A key may come to mean another page once its first one is gone.

mod clock;
mod fifo;
mod peak;
mod random;
mod rings;
mod samples;
mod second_chance;
mod stable_set;
mod two_queue;
mod wrote;

pub use clock::{EvictionClock, STAMP_BITS};
pub use fifo::Fifo;
pub use random::Random;
pub use second_chance::SecondChance;
pub use stable_set::StableSet;
pub use two_queue::TwoQueue;

/// Page keys are below this.
pub const PAGE_KEY_LIMIT: u32 = 1 << 30;

/// Most bytes that any order here but `random` takes for each page of local memory.
pub const MAX_BYTES_PER_PAGE: usize = 8;

/// How a page came to be resident.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Installed {
    /// Fetched because of a fault, and never evicted before.
    Demand,
    /// Fetched ahead of a fault that has not come yet, and never evicted before (it was in the
    /// pool from the start, as after a migration).
    Prefetched,
    /// Fetched ahead of a fault, after having been evicted; a trigger page when it is mapped.
    PrefetchedAgain {
        /// Evictions between this page's own and now.
        distance: u64,
    },
    /// Fetched because of a fault, after having been evicted.
    Refault {
        /// Evictions between this page's own and now.
        distance: u64,
    },
    /// Wanted again while it was in the staging cache (not as a trigger of prefetching), or handed
    /// back by the evictor.
    Rescued,
    /// Filled with zeros at its first touch, or ahead of it.
    ZeroFill,
}

/// An eviction order. See the [module](self) for the protocol.
pub trait Order: Send {
    /// The name in tables.
    fn name(&self) -> &'static str;

    /// `page` has become resident.
    fn installed(&mut self, page: u32, how: Installed);

    /// `page`, resident and clean, has been written to.
    fn referenced(&mut self, page: u32);

    /// `page`, resident, has gone without being a victim.
    fn removed(&mut self, page: u32);

    /// Appends up to `n` pages to `out`, those to evict first; fewer only if no more are known.
    fn victims(&mut self, n: usize, still: &mut dyn FnMut(u32) -> bool, out: &mut Vec<u32>);

    /// Pages in the order, as far as it was told.
    fn len(&self) -> usize;

    /// Memory that the order takes, in bytes.
    fn memory_bytes(&self) -> usize;

    /// Whether no page is in the order.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The order that pagers use. Chosen by replay: see `docs/eviction.md`.
pub fn default() -> Box<dyn Order> {
    Box::new(StableSet::new())
}

/// Every order, for comparison, for a local memory of about `capacity_pages`.
pub fn all(capacity_pages: usize) -> Vec<Box<dyn Order>> {
    vec![
        Box::new(Fifo::new()),
        Box::new(Random::new(1)),
        Box::new(SecondChance::new(capacity_pages)),
        Box::new(TwoQueue::new(capacity_pages)),
        Box::new(StableSet::new()),
    ]
}
