//! What nodes and the manager say to each other: the paper's table II.
//!
//! Messages between two parties arrive in the order in which they were sent, as over TCP.

use super::{Home, NodeId};

/// Pages of one home that pass between owners. A daemon sends the list of extents with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Block {
    /// Whose memory it is.
    pub home: Home,
    /// How much.
    pub pages: u64,
}

/// What a node owns, sent each second (*Statistics*).
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Holdings {
    /// The life that the node is in.
    pub life: u64,
    /// Messages of the manager that it has acted upon since it connected and that are counted
    /// ([`ToNode::is_counted`]). A node that has acted upon a Force-Return or an Invalidate accepts no page of that
    /// home any more, which is what the manager waits for; statistics sent before that say nothing about it.
    pub messages_handled: u64,
    /// Pages of its own memory, lent ones included.
    pub home_pages: u64,
    /// Owned pages that no consumer uses.
    pub free_pages: u64,
    /// Pages that its consumers could use ([`super::targets::Decision::wanted_pages`]). Not in the paper.
    pub wanted_pages: u64,
    /// What it owns, in the order of the homes.
    pub owned: Vec<Block>,
}

/// From a node to the manager.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ToManager {
    /// A new node (Inactive → Active), in a life that it has not registered before, owning all of its memory.
    Register {
        /// The new life.
        life: u64,
    },
    /// What it owns.
    Statistics(Holdings),
    /// It needs so many pages more, from whomever.
    GrantAny {
        /// How many.
        pages: u64,
    },
    /// It wants to leave, for a shutdown say (Active → Leaving).
    LeaveReq,
    /// It has thought better of leaving (Leaving → Active). Not in the paper.
    Stay,
    /// It starts after a life that did not end cleanly: what it lent is gone (Active, Leaving → Recovery).
    Invalidate,
}

/// From the manager to a node.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum ToNode {
    /// Pages of this home are to be accepted from now on (the paper's `e = 1`; *Force-Return* and *Invalidate* say
    /// that they are not).
    EnableNode(Home),
    /// Give so many free pages to that node.
    GrantFwd {
        /// How many.
        pages: u64,
        /// To whom.
        to: NodeId,
    },
    /// That node leaves: accept none of its pages, and send home those that are owned.
    ForceReturn(NodeId),
    /// The recipient has left.
    LeaveNotify,
    /// The recipient takes part as before. Not in the paper.
    StayNotify,
    /// What is at that node is lost: accept none of its pages, and forget those that are owned.
    Invalidate(NodeId),
    /// Nobody knows the recipient's former life any more; it may register.
    InvalidateNotify,
}

impl ToNode {
    /// Whether it is counted. *Enable-Node* is not: nobody waits for it, and where nodes know otherwise whose
    /// pages there are, from a list that all are told, it need not be sent.
    pub fn is_counted(&self) -> bool {
        !matches!(self, ToNode::EnableNode(_))
    }
}

/// What a node sends, and to whom.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Outgoing {
    /// To the manager.
    Manager(ToManager),
    /// *Grant*: ownership passes to another node.
    Grant {
        /// The new owner.
        to: NodeId,
        /// What it gets.
        blocks: Vec<Block>,
    },
}
