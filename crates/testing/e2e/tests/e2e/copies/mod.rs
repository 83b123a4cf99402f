//! Copies of pages: donors are lost, wrong, full or curious, and the pages stay as they were.

pub(crate) mod cold;
pub(crate) mod encrypted;
pub(crate) mod hosts;
pub(crate) mod integrity;
pub(crate) mod mirror;
pub(crate) mod parking;
pub(crate) mod recovery;
pub(crate) mod restart;
