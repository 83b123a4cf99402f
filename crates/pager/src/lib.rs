//! userfaultfd paging: residency, eviction, prefetch
