//! Queues the orders to unmap shared memory.

use hecaton_uffd::files::Unmap;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;

/// Orders that wait. The keeper sends one at a time.
const MAX_ORDERS: usize = 16;

/// Orders that are not done yet. The end of a connection says that its order is.
#[derive(Default)]
pub(crate) struct UnmapOrders(VecDeque<(Unmap, OwnedFd)>);

impl UnmapOrders {
    /// Drops the order if there are too many.
    pub(crate) fn push(&mut self, order: Unmap, connection: OwnedFd) {
        if self.0.len() < MAX_ORDERS {
            self.0.push_back((order, connection));
        }
    }

    pub(super) fn pop(&mut self) -> Option<(Unmap, OwnedFd)> {
        self.0.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
