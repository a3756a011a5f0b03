//go:build race

package dualcheck

// raceDetector: the pools give back less than they are given.
const raceDetector = true
