// Package robustness holds tests that break things at random for as long as they are
// told to, record every call, and judge the record afterwards against what is
// promised. They take -robustness.duration and -robustness.seed.
package robustness
