//! Takes care of the programs: they attach, fork, and map memory.

pub(crate) mod address_space;
pub(crate) mod attach;
pub(crate) mod discover;
pub(crate) mod fork;
pub(crate) mod helper;
pub(crate) mod helper_loss;
pub(crate) mod inherit;
pub(crate) mod mappings;
pub(crate) mod outside;
pub(crate) mod remote;
pub(crate) mod stage;
