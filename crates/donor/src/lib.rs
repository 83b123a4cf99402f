//! Lends extents of this host's memory and serves page requests
