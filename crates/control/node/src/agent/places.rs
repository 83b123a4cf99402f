//! The broker counts a host's NUMA nodes from 0; the kernel's numbers may have gaps.

use hecaton_broker::NodeNo;

/// Where the kernel's NUMA nodes stand in the broker's list.
#[derive(Clone, Copy)]
pub(super) struct Places<'a>(pub(super) &'a [u32]);

impl Places<'_> {
    /// Place of a machine part's node; `None` if the host no longer has that node.
    pub(super) fn of(self, host_node: Option<u32>) -> Option<NodeNo> {
        match host_node {
            None => Some(0),
            Some(number) => self.0.iter().position(|node| *node == number),
        }
    }
}
