//! The cluster as a whole: managers, orders, keys, and what people and programs are told.

pub(crate) mod announce;
pub(crate) mod api;
pub(crate) mod dashboard;
pub(crate) mod grants;
pub(crate) mod managers;
pub(crate) mod policy;
pub(crate) mod secrets;
pub(crate) mod secure;
pub(crate) mod usage;
