//! The behaviour of the manager inside a guest.

mod governor;
mod host;
mod manager;
