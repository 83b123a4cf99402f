//! Defines the messages between nodes and the manager: the paper's table II.
//!
//! Messages between two ends arrive in the order in which they were sent, as over TCP.

use super::{Home, NodeId};

/// A number of pages of one home that change owner. A daemon sends the list of extents with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// The home that the pages belong to.
    pub home: Home,
    /// Number of pages.
    pub pages: u64,
}

/// Pages that a node owns, sent each second (*Statistics*).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Holdings {
    /// The node's present life.
    pub life: u64,
    /// Counted messages ([`ToNode::is_counted`]) of the manager that the node has acted upon since
    /// it connected. The manager waits for this: a node that has acted upon a Force-Return or an
    /// Invalidate accepts no page of that home any more. Earlier statistics do not prove that.
    pub messages_handled: u64,
    /// Pages of its own memory, lent ones included.
    pub home_pages: u64,
    /// Owned pages that no consumer uses.
    pub free_pages: u64,
    /// Pages consumers could use ([`super::targets::Decision::wanted_pages`]). Not in the paper.
    pub wanted_pages: u64,
    /// Owned pages, in the order of the homes.
    pub owned: Vec<Block>,
}

/// From a node to the manager.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ToManager {
    /// A new node (Inactive → Active), in a life never registered before, owning all its memory.
    Register {
        /// The new life.
        life: u64,
    },
    /// Pages that the node owns.
    Statistics(Holdings),
    /// The node needs more pages, from any node.
    GrantAny {
        /// Number of pages.
        pages: u64,
    },
    /// The node wants to leave, for example to shut down (Active → Leaving).
    LeaveReq,
    /// The node no longer wants to leave (Leaving → Active). Not in the paper.
    Stay,
    /// The node's last life ended uncleanly: what it lent is lost (Active, Leaving → Recovery).
    Invalidate,
}

/// From the manager to a node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ToNode {
    /// Accept pages of this home from now on (the paper's `e = 1`). *Force-Return* and *Invalidate*
    /// end that.
    EnableNode(Home),
    /// Give this many free pages to another node.
    GrantFwd {
        /// Number of pages.
        pages: u64,
        /// The node that receives the pages.
        to: NodeId,
    },
    /// The named node leaves: accept none of its pages, and send home those that are owned.
    ForceReturn(NodeId),
    /// The recipient has left.
    LeaveNotify,
    /// The recipient takes part as before. Not in the paper.
    StayNotify,
    /// The named node's memory is lost: accept none of its pages, and forget owned ones.
    Invalidate(NodeId),
    /// No node knows the recipient's former life any more; the recipient may register.
    InvalidateNotify,
}

impl ToNode {
    /// Whether the message is counted. *Enable-Node* is not: the manager does not wait for it, and
    /// need not send it where nodes learn all homes from a common list.
    pub fn is_counted(&self) -> bool {
        !matches!(self, ToNode::EnableNode(_))
    }
}

/// A message of a node, with its recipient.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Outgoing {
    /// To the manager.
    Manager(ToManager),
    /// *Grant*: ownership passes to another node.
    Grant {
        /// The new owner.
        to: NodeId,
        /// The granted pages.
        blocks: Vec<Block>,
    },
}
