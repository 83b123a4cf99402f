//! Serves the manager's API over HTTP, with TLS and roles.

pub mod api;
pub mod events;
pub mod metrics;
pub(crate) mod openapi;
pub mod permission;
mod prefer;
pub mod server;
pub(crate) mod tls;
