//! Decides how much of the pool each node and consumer may hold.
//!
//! After vMCA (Garrido and Carpenter, 2017; sections III and V), with the same two levels. Each
//! node divides what it owns among its consumers ([`targets`]), and the manager decides which nodes
//! give to a node in need ([`grants`]). The manager moves *quotas*: it says how many pages go from
//! one node to another, and nodes pass the pages to each other. Membership is a state machine with
//! two sides, the manager's ([`membership`]) and a node's ([`member`]), that exchange the paper's
//! messages ([`message`]).
//!
//! The paper's names, where they differ: an MM is a *node*, the MM-M is the *manager*, a VM is a
//! *consumer*, and tmem is the pool.

pub mod account;
pub mod choice;
pub mod grants;
pub mod member;
pub mod membership;
pub mod message;
pub mod quotas;
pub mod targets;

use serde::Serialize;

/// A node of the cluster.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// A program, VM, volume or tmem client that pool pages are accounted to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub struct ConsumerId(pub u64);

/// One life of a node, from one registration to the next.
///
/// Memory that a node lent in an earlier life no longer exists. The paper separates lives by
/// waiting until every node has given up the earlier life's pages. That is not enough: a grant may
/// be in flight between two nodes that both confirmed to own nothing there. So pages carry the life
/// of their home, as data requests carry an epoch (decision 4 of the design).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Home {
    /// The node that the memory belongs to.
    pub node: NodeId,
    /// A number that the node uses for one registration only.
    pub life: u64,
}
