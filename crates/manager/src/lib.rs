//! The control plane: registry, HTTP API
