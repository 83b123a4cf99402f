//! Spaces: segments, groups, thin allocation over donors
