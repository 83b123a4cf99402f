//! The host daemon: supervises donors and pagers
