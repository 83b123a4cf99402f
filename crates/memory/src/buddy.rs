//! The buddy allocator that carves an arena into extents.
