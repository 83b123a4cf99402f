//! Commands about the nodes of a cluster.

pub(crate) mod drain;
pub(crate) mod giving_back;
pub(crate) mod node_list;
pub(crate) mod recall;
