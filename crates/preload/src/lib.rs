//! libhecaton.so: hands a program's memory to its pager
