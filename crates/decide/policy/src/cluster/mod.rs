//! Who of a cluster may hold how much of the pool.
//!
//! After vMCA (Garrido and Carpenter, 2017; sections III and V), whose two levels are kept: each node
//! divides what it owns among its consumers ([`targets`]), and the manager decides from which nodes a
//! node in need gets more ([`grants`]). The manager moves *quotas*: it says how many pages go from whom to
//! whom, and nodes pass the pages to each other. Which nodes take part is a state machine with two
//! sides, the manager's ([`membership`]) and a node's ([`member`]), that speak the paper's
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

/// Whatever pool pages are accounted to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(transparent)]
pub struct ConsumerId(pub u64);

/// One life of a node, from one registration to the next.
///
/// Memory that a node lent in an earlier life is not what is there now. The paper tells lives apart by
/// waiting until every node has given up the earlier one's pages; that is not enough, because a grant
/// may be under way between two nodes which both have confirmed that they own nothing there. So
/// pages carry the life of their home, as data requests carry an epoch (decision 4 of the design).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
pub struct Home {
    /// The node whose memory it is.
    pub node: NodeId,
    /// A number that the node uses for one registration only.
    pub life: u64,
}
